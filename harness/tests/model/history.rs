//! Histories: lists of steps, made at random from a seed. A step is a plain value that means something after any
//! others, so that steps can be left out to find the smallest history that fails.

use crate::common::Random;
use crate::contract::Micros;

pub const SESSIONS: usize = 3;
pub const KEYS: usize = 4;
pub const NAMES: usize = 3;

pub const SECOND: Micros = 1_000_000;
pub const MINUTE: Micros = 60 * SECOND;
const HOUR: Micros = 60 * MINUTE;
const DAY: Micros = 24 * HOUR;

/// Which token a call brings.
#[derive(Clone, Copy, Debug)]
pub enum Token {
    /// None: the transaction's own claim.
    Own,
    /// The last that was given for the key or name, or the one so many before.
    Last(usize),
    Unknown,
}

/// What becomes of a purge.
#[derive(Clone, Copy, Debug)]
pub enum Fate {
    Commits,
    RollsBack,
    Crashes,
}

#[derive(Clone, Debug)]
pub enum Call {
    Begin {
        fingerprint: Option<&'static str>,
        owner: Option<&'static str>,
        lease: Option<Micros>,
        takeover: bool,
    },
    Complete {
        token: Token,
        ttl: Option<Micros>,
        result: Option<u64>,
        body: usize,
    },
    Release {
        token: Token,
    },
    Extend {
        token: Token,
        lease: Option<Micros>,
    },
    Checkpoint {
        token: Token,
        lease: Option<Micros>,
        saved: u64,
    },
    Get {
        owner: Option<&'static str>,
    },
    Forget,
    Once {
        ttl: Option<Micros>,
    },
    LockTry {
        ttl: Option<Micros>,
        holder: Option<&'static str>,
    },
    LockTryXact,
    LockExtend {
        token: Token,
        ttl: Option<Micros>,
    },
    LockUnlock {
        token: Token,
    },
    LockGuard {
        token: Token,
    },
}

impl Call {
    pub fn name(&self) -> &'static str {
        match self {
            Call::Begin { .. } => "begin",
            Call::Complete { .. } => "complete",
            Call::Release { .. } => "release",
            Call::Extend { .. } => "extend",
            Call::Checkpoint { .. } => "checkpoint",
            Call::Get { .. } => "get",
            Call::Forget => "forget",
            Call::Once { .. } => "once",
            Call::LockTry { .. } => "lock_try",
            Call::LockTryXact => "lock_try_xact",
            Call::LockExtend { .. } => "lock_extend",
            Call::LockUnlock { .. } => "lock_unlock",
            Call::LockGuard { .. } => "lock_guard",
        }
    }
}

#[derive(Clone, Debug)]
pub enum Step {
    /// A call, for one of the keys or names. Unless it is blunt it makes sense in its session: see `Play::fitting`.
    Call {
        session: usize,
        item: usize,
        call: Call,
        blunt: bool,
    },
    Start(usize, &'static str),
    Commit(usize),
    RollBack(usize),
    Savepoint(usize),
    RollBackTo(usize),
    ReleaseSavepoint(usize),
    /// The connection is lost.
    Terminate(usize),
    Purge {
        session: usize,
        rows: u32,
        fate: Fate,
    },
    /// `idem.ttl`
    Ttl(Micros),
    /// The clock goes on, or back.
    Clock(Micros),
    /// To so much before or after the end of the record under a key, or of a lock.
    ClockToKey(usize, Micros),
    ClockToName(usize, Micros),
    /// To so much before or after the bound of the current segment.
    ClockToBound(Micros),
    Crash {
        kill: bool,
    },
}

fn one<T: Clone>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize].clone()
}

pub fn history(random: &mut Random, steps: usize) -> Vec<Step> {
    (0..steps).map(|_| step(random)).collect()
}

fn step(random: &mut Random) -> Step {
    let session = random.below(SESSIONS as u64) as usize;
    match random.below(1_000) {
        0..510 => key_call(random, session),
        510..640 => name_call(random, session),
        640..720 => Step::Start(session, one(random, &["READ COMMITTED", "REPEATABLE READ"])),
        720..770 => Step::Commit(session),
        770..790 => Step::RollBack(session),
        790..810 => Step::Savepoint(session),
        810..830 => Step::RollBackTo(session),
        830..840 => Step::ReleaseSavepoint(session),
        840..843 => Step::Terminate(session),
        843..910 => {
            let rows = one(random, &[1, 2, 10_000, 10_000]);
            let crashes = one(random, &[Fate::RollsBack, Fate::RollsBack, Fate::Crashes]);
            let commits = random.below(20) > 0;
            Step::Purge { session, rows, fate: if commits { Fate::Commits } else { crashes } }
        }
        910..920 => Step::Ttl(one(random, &[MINUTE, HOUR, DAY, 2 * DAY])),
        920..968 => {
            let steps =
                [1, SECOND, 30 * SECOND, MINUTE, 30 * MINUTE, HOUR, 13 * HOUR, DAY, 2 * DAY];
            let step = one(random, &steps);
            Step::Clock(if random.below(4) == 0 { -step } else { step })
        }
        968..988 => Step::ClockToKey(random.below(KEYS as u64) as usize, one(random, &[-1, 0, 1])),
        988..993 => {
            Step::ClockToName(random.below(NAMES as u64) as usize, one(random, &[-1, 0, 1]))
        }
        993..998 => Step::ClockToBound(one(random, &[-1, 0, 1, -HOUR])),
        _ => Step::Crash { kill: random.below(2) == 0 },
    }
}

fn token(random: &mut Random) -> Token {
    match random.below(20) {
        0..8 => Token::Own,
        8..16 => Token::Last(0),
        16..18 => Token::Last(1),
        18 => Token::Last(2),
        _ => Token::Unknown,
    }
}

fn lease(random: &mut Random) -> Option<Micros> {
    let some = one(random, &[1, SECOND, MINUTE, HOUR, DAY]);
    (random.below(2) == 0).then_some(some)
}

fn ttl(random: &mut Random) -> Option<Micros> {
    let some = one(random, &[1, SECOND, MINUTE, HOUR, DAY, 3 * DAY]);
    (random.below(2) == 0).then_some(some)
}

fn owner(random: &mut Random) -> Option<&'static str> {
    one(random, &[None, None, None, Some("ann"), Some("bob")])
}

fn key_call(random: &mut Random, session: usize) -> Step {
    let key = random.below(KEYS as u64) as usize;
    let token = token(random);
    let call = match random.below(100) {
        0..36 => Call::Begin {
            fingerprint: one(random, &[None, None, None, Some("one"), Some("two")]),
            owner: owner(random),
            lease: lease(random),
            takeover: random.below(6) > 0,
        },
        36..62 => {
            let result = (random.below(4) > 0).then(|| random.below(1_000));
            let body = one(random, &[0, 0, 10, 5_000]);
            Call::Complete { token, ttl: ttl(random), result, body }
        }
        62..68 => Call::Release { token },
        68..75 => Call::Extend { token, lease: lease(random) },
        75..82 => Call::Checkpoint { token, lease: lease(random), saved: random.below(1_000) },
        82..90 => Call::Get { owner: owner(random) },
        90..93 => Call::Forget,
        _ => Call::Once { ttl: ttl(random) },
    };
    Step::Call { session, item: key, call, blunt: random.below(8) == 0 }
}

fn name_call(random: &mut Random, session: usize) -> Step {
    let name = random.below(NAMES as u64) as usize;
    let token = Token::Last(one(random, &[0, 0, 0, 1]));
    let call = match random.below(20) {
        0..8 => Call::LockTry { ttl: lease(random), holder: owner(random) },
        8..10 => Call::LockTryXact,
        10..13 => Call::LockExtend { token, ttl: lease(random) },
        13..17 => Call::LockUnlock { token },
        _ => Call::LockGuard { token },
    };
    Step::Call { session, item: name, call, blunt: random.below(8) == 0 }
}
