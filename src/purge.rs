//! Purging: what counts no more is removed, without waiting for anybody and without anybody waiting noticeably.
//!
//! A filter comes first, of one segment that needs it, while nothing is locked that others want: it takes a second for a million
//! records. Then rows go, a bounded number of them: finished records outside the segments, abandoned claims, the rows of idle
//! locks. No key's lock is taken for that: a row that counts no more is removed only if nobody has changed it, or is about
//! to; whoever wants to change it afterwards waits for the end of this transaction and finds it gone. Then the ring
//! is turned: segments whose bound has passed are emptied as a whole, and if it is time the next one becomes the current
//! one. That comes last because an emptied segment stays locked until the transaction ends.

use crate::filters;
use crate::ring::Turning;
use crate::storage::{self, Segment};
use crate::{leases, pg, settings};
use idem_core::Moment;
use idem_core::error::Error;
use idem_core::ring::SEGMENTS;
use pgrx::pg_sys;

/// Removes what has expired, at most `max_rows` rows one by one, and segments as a whole; says how many rows were
/// reclaimed.
pub fn purge(function: pg_sys::Oid, max_rows: u64) -> Result<u64, Error> {
    let turning = Turning::begin(function)?;
    if let Some(turning) = &turning
        && !turning.ours
    {
        filters::make_one(function, &turning.ring, pg::now())?;
    }
    let (now, ttl) = (pg::now(), settings::ttl());
    let mut deleted = storage::purge_long(function, now, max_rows)?;
    if deleted < max_rows {
        deleted += storage::purge_claims(function, now - ttl, max_rows - deleted)?;
    }
    if deleted < max_rows {
        deleted += leases::purge(function, ttl, now, max_rows - deleted)?;
    }
    if let Some(turning) = turning {
        deleted += turn(function, &turning, now)?;
        turning.end();
    }
    Ok(deleted)
}

/// Empties the segments that are over and goes on to the next one if it is time; says how many rows they had.
fn turn(function: pg_sys::Oid, turning: &Turning, now: Moment) -> Result<u64, Error> {
    let ring = &turning.ring;
    let current = ring.current().map(|turn| turn.segment());
    let (mut rows, mut bytes) = (0, 0);
    let mut empty = [false; SEGMENTS];
    for (segment, empty) in empty.iter_mut().enumerate() {
        let Some(Segment { bytes: found, worthless }) =
            storage::examine_segment(function, segment, now)?
        else {
            continue;
        };
        let over = ring.last(segment).is_some_and(|turn| turn.is_over(now));
        let mut left = found;
        if found > 0
            && (over || worthless)
            && let Some(emptied) = storage::empty_segment(function, segment, over, now)?
        {
            filters::remove(function, segment)?;
            rows += emptied;
            left = 0;
        }
        *empty = left == 0;
        if current == Some(segment) {
            bytes = left;
        }
    }
    if let Some(next) = ring.next(settings::ttl(), bytes, empty, now)
        && storage::reserve_segment(function, next.segment())?
        && filters::remove(function, next.segment())?
    {
        turning.go_on(next)?;
    }
    Ok(rows)
}
