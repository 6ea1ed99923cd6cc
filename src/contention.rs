//! A name that others may want too: trying its lock, looking, and waiting for whoever is in the way.
//!
//! The order is: try the lock, then look. With the lock, the look is final. Without it, somebody is
//! at the name at this moment, and a look can still tell something: a finished record, a live lease.
//! If it tells nothing, the answer is the transaction that held the name, exclusively or to prolong its
//! lease, all through a look. There may be none: the holder has ended just now, or others hold a key's
//! lock just for looks of their own, in other modes, perhaps with more callers queueing behind them. Then
//! nobody holds the key, and the lock is tried until it can be had. A lock that led to nothing is given
//! back at once.
//!
//! A caller with patience queues for the lock while an open transaction has it exclusively, and
//! sleeps while a lease runs: registered on the wake tag first, then one more look, then sleep (see
//! `pg::lock`). Whether another is about to change the lease is asked *before* that look: asked after
//! it, a change that commits in between would be slept through.

use crate::pg;
use crate::pg::lock::{self, Mode, Tried};
use idem_core::error::Error;
use idem_core::identity::{Domain, Identity};
use idem_core::{Micros, Moment};
use std::time::Instant;

/// How long to wait for somebody who is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// 0: answer at once.
    For(Micros),
    Forever,
}

/// How long a waiter sleeps before it looks again whether the end of a lease has changed, while a
/// transaction that changes it is open.
const PAUSE_IF_PROLONGED: Micros = 20_000;

/// What a look found.
pub enum Seen<T> {
    /// The caller's answer; `keep_lock`: the lock stays until the transaction ends.
    Answer { answer: T, keep_lock: bool },
    /// Somebody else has the name on a lease.
    Leased(Lease),
    /// Nothing that counts. Only for a look without the lock. `stale`: there is a row all the same.
    Nothing { stale: bool },
}

/// Somebody else's lease.
#[derive(Clone, Copy)]
pub struct Lease {
    pub end: Moment,
    /// What is left of it, above 0.
    pub left: Micros,
}

/// Who is still in the way when patience is over; `None`: an open transaction.
pub struct Busy {
    pub lease: Option<Lease>,
}

/// The pause before the lock of a name is tried again, and how often that is done, before the lock is queued for.
const PAUSE: Micros = 50;
const PAUSES: u32 = 20;

/// How long the lock is queued for at a time.
const QUEUE: Micros = 1_000;

/// How often the lock of a key is tried again that nobody holds but for a look: ten seconds, as good as for ever. Looks
/// take microseconds.
const TRIES_IF_NOT_HELD: u32 = 10_000;

/// How often it is tried again when the other may hold the lock just for a look, or for more: where a
/// record is that counts no more, or a lease that is over (another may be about to be refused); and of
/// the name of a lock, which may be guarded.
const TRIES_IF_UNSURE: u32 = 8;

/// Has `look` look at the name, with its lock if it can be had, until there is an answer or `wait` is
/// over.
pub fn contend<T>(
    identity: &Identity,
    wait: Wait,
    mut look: impl FnMut(Tried) -> Result<Seen<T>, Error>,
) -> Result<Result<T, Busy>, Error> {
    // Nobody asks since when, if there is no patience.
    let since = (wait != Wait::For(0)).then(Instant::now);
    let mut again = 0;
    // Who held the name before the look.
    let mut holder = None;
    let mut registered = false;
    // Set when the lock was queued for, and is held at the start of the next round.
    let mut queued = false;

    let outcome = loop {
        let tried = match queued {
            true => Tried::Taken,
            false => lock::try_lock(identity.key_tag, Mode::Exclusive),
        };
        queued = false;
        let locked = tried != Tried::Busy;

        // Asked before the look: what is not going on now has been committed, and the look sees it, or
        // comes later and wakes a caller who is registered.
        let other = match locked || wait == Wait::For(0) {
            true => None,
            false => lock::holder(identity.key_tag).map(|(_, mode)| mode),
        };

        let mut stale = false;
        let lease = match look(tried)? {
            Seen::Answer { answer, keep_lock } => {
                if locked && !keep_lock {
                    lock::unlock(identity.key_tag, Mode::Exclusive);
                }
                break Ok(answer);
            }
            Seen::Leased(lease) => Some(lease),
            Seen::Nothing { stale: row } => {
                stale = row;
                None
            }
        };
        if locked {
            lock::unlock(identity.key_tag, Mode::Exclusive);
        }

        let patience = since.and_then(|since| Some((since, patience(wait, since)?)));
        let Some((since, patience)) = patience else {
            if lease.is_some() {
                break Err(Busy { lease });
            }
            let before = std::mem::replace(&mut holder, lock::holder(identity.key_tag));
            let tries = match (holder, identity.domain) {
                (Some((_, Mode::Exclusive)), _) if holder == before && stale => TRIES_IF_UNSURE,
                (Some(_), _) if holder == before => 0,
                (None, Domain::Lock) => TRIES_IF_UNSURE,
                (Some(_), _) | (None, Domain::Key) => TRIES_IF_NOT_HELD,
            };
            if again >= tries {
                break Err(Busy { lease });
            }
            again += 1;
            pg::check_for_interrupts();
            if holder == before || holder.is_none() {
                if again <= PAUSES {
                    pg::pause(PAUSE);
                } else {
                    queued = lock::lock_within(identity.key_tag, Mode::Exclusive, QUEUE);
                }
            }
            continue;
        };
        match lease {
            // Whoever only prolongs or guards the lease is nothing to queue for: it would keep
            // the next one who prolongs waiting behind us.
            Some(lease) if other != Some(Mode::Exclusive) => {
                if registered {
                    let left = match other {
                        Some(_) => lease.left.min(PAUSE_IF_PROLONGED),
                        None => lease.left,
                    };
                    sleep(Lease { left, ..lease }, patience, since)?;
                } else {
                    lock::try_lock(identity.wake_tag, Mode::Share);
                    registered = true;
                }
            }
            _ => {
                queued = match patience {
                    Patience::Left(left) => {
                        lock::lock_within(identity.key_tag, Mode::Exclusive, left)
                    }
                    Patience::Endless => {
                        lock::lock(identity.key_tag, Mode::Exclusive);
                        true
                    }
                }
            }
        }
    };
    if registered {
        lock::unlock(identity.wake_tag, Mode::Share);
    }
    Ok(outcome)
}

/// What is left of a wait.
#[derive(Clone, Copy)]
enum Patience {
    Left(Micros),
    Endless,
}

fn patience(wait: Wait, since: Instant) -> Option<Patience> {
    match wait {
        Wait::Forever => Some(Patience::Endless),
        Wait::For(wait) => {
            let left = wait - elapsed(since);
            (left > 0).then_some(Patience::Left(left))
        }
    }
}

fn elapsed(since: Instant) -> Micros {
    Micros::try_from(since.elapsed().as_micros()).unwrap_or(Micros::MAX)
}

/// A waiter looks again after so long, woken or not: where its look had to wait for a block or a lock, that may have used up
/// the wake-up of somebody who ended the lease at that moment.
const LONGEST_SLEEP: Micros = 10_000_000;

/// One sleep of a waiter for a lease; `lock_timeout` counts from the start of the wait.
fn sleep(lease: Lease, patience: Patience, since: Instant) -> Result<(), Error> {
    let mut length = lease.left.min(LONGEST_SLEEP);
    if let Patience::Left(left) = patience {
        length = length.min(left);
    }
    if let Some(timeout) = pg::lock_timeout() {
        let before_timeout = timeout - elapsed(since);
        if before_timeout <= 0 {
            return Err(Error::LockTimeout);
        }
        length = length.min(before_timeout);
    }
    lock::sleep(length);
    Ok(())
}
