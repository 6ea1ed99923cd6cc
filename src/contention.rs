//! A name that others may want too: trying its lock, looking, and waiting for whoever is in the way.
//!
//! The order is: try the lock, then look. With the lock, the look is final. Without it, somebody is
//! at the name at this moment, and a look can still tell something: a finished record, a live lease.
//! If it tells nothing, the other is an open transaction, which is the answer, unless it ended just
//! now; so the lock is tried once more. Or it is a caller who holds a key's lock, in share mode, just
//! for a look of its own: then nobody holds the key, and the lock is tried until it can be had. A
//! lock that led to nothing is given back at once.
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

/// Pauses before the lock of a busy name is tried again, its holder having ended perhaps just now:
/// together well under half a millisecond.
const PAUSES_IF_HELD: [Micros; 4] = [0, 0, 10, 30];

/// The pause before the lock of a key is tried again that is only looked at, and how often. Looks take
/// microseconds; that one is interrupted by the scheduler for so long is next to impossible.
const PAUSE_IF_LOOKED_AT: Micros = 50;
const TRIES_IF_LOOKED_AT: u32 = 1_000;

/// How often it is tried again when the other may hold the lock just for a look, or for more: where a
/// record is that counts no more, or a lease that is over (another may be about to be refused); and of
/// the name of a lock.
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
    let mut pauses = PAUSES_IF_HELD.iter();
    let mut looked_at = 0;
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
            true => Other::Nothing,
            false => other_at(identity),
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
            let tries = match identity.domain {
                Domain::Key if lock::only_looked_at(identity.key_tag) => TRIES_IF_LOOKED_AT,
                Domain::Key if stale => TRIES_IF_UNSURE,
                // Or it is guarded, which seems the same.
                Domain::Lock if lock::only_looked_at(identity.key_tag) => TRIES_IF_UNSURE,
                Domain::Key | Domain::Lock => 0,
            };
            if looked_at < tries {
                looked_at += 1;
                pg::pause(PAUSE_IF_LOOKED_AT);
            } else if let Some(pause) = pauses.next() {
                pg::pause(*pause);
            } else {
                break Err(Busy { lease });
            }
            continue;
        };
        match lease {
            // Whoever only prolongs or guards the lease is nothing to queue for: it would keep
            // the next one who prolongs waiting behind us.
            Some(lease) if other != Other::Ending => {
                if registered {
                    let left = match other {
                        Other::Prolonging => lease.left.min(PAUSE_IF_PROLONGED),
                        _ => lease.left,
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

/// What another transaction is about to do at a name whose lock it has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Other {
    /// To end a lease, or to claim or take the name.
    Ending,
    /// To change the end of a lease.
    Prolonging,
    /// To guard it, or to look.
    Nothing,
}

fn other_at(identity: &Identity) -> Other {
    if lock::exclusively_held(identity.key_tag) {
        Other::Ending
    } else if lock::only_looked_at(identity.key_tag) {
        Other::Nothing
    } else {
        Other::Prolonging
    }
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

/// One sleep of a waiter for a lease; `lock_timeout` counts from the start of the wait.
fn sleep(lease: Lease, patience: Patience, since: Instant) -> Result<(), Error> {
    let mut length = lease.left;
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
