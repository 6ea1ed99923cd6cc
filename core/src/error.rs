//! Every error that idem itself raises: SQLSTATE, message, DETAIL and HINT.
//!
//! The SQLSTATEs are part of the contract and stable for ever. No message, detail or hint holds a key, scope,
//! fingerprint, token or result: errors end up in server logs.

/// An error as a user meets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// 22004: NULL where a value is needed.
    Null { argument: &'static str },
    /// 22023: an empty text where at least one byte is needed.
    Empty { argument: &'static str },
    /// 22023: a text over [`crate::limits::LONGEST_NAME`].
    TooLong { argument: &'static str, bytes: usize },
    /// 22023: a duration outside its range.
    Duration { argument: &'static str, range: &'static str },
    /// 22023: a number outside its range.
    Count { argument: &'static str, range: &'static str },
    /// 22023: `idem_begin` repeated by the holder with another lease.
    OtherLease,
    /// 22023: extending a claim that has no lease.
    NoLease,
    /// 22004: NULL among the parts of a list.
    NullPart,
    /// 22023: a list without parts.
    NoParts,
    /// 22023: checkpointing a claim that has no lease.
    NothingToRecover,
    /// 42809: a user's function that cannot be called.
    WrongFunction { role: Role, problem: &'static str },
    /// 42883: a user's function that does not exist (any more).
    NoFunction { role: Role },
    /// 22023: `idem.authorizer` is no qualified name.
    AuthorizerName,
    /// ID001: somebody else holds the key; if on a lease, for so many microseconds more.
    InProgress { retry_after: Option<crate::Micros> },
    /// ID001: this very transaction holds the key.
    InProgressHere,
    /// ID002: the key belongs to a different request.
    FingerprintMismatch,
    /// ID004: the record belongs to somebody else.
    OwnerMismatch,
    /// ID005: a lease ran out, and the caller does not want to take over.
    Abandoned { attempt: i32 },
    /// ID003: the token, or the transaction, does not hold the key.
    ClaimLost(Lost),
    /// ID006: the result is over `idem.max_result_size`.
    ResultTooLarge { bytes: u64, limit: u64 },
    /// ID007: the transaction would commit or prepare with claims that nobody could complete.
    ClaimOpen { claims: usize, autocommit: bool },
    /// ID011: the token does not, or no longer, hold the lock.
    LockLost(LockLost),
    /// 55P03: `lock_timeout` ran out while waiting for a lease.
    LockTimeout,
    /// 55000: the SQL objects are not those this library was built for.
    OtherVersion { found: &'static str },
    /// XX001: two keys share a digest, or a row is not what its index says.
    Corrupted { found: &'static str },
}

/// What a user's function is called for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The work of `idem_run`.
    Work,
    /// The function that `idem.authorizer` names.
    Authorizer,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Work => "the function given to idem_run",
            Role::Authorizer => "the function named by idem.authorizer",
        }
    }

    fn shape(self) -> &'static str {
        match self {
            Role::Work => "Give a function that takes one jsonb and returns one jsonb.",
            Role::Authorizer => {
                "Set idem.authorizer to schema.function, whose arguments are (caller text, owner text) and whose result is boolean."
            }
        }
    }
}

/// Why a claim is not, or no longer, the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Somebody else holds the key on another token.
    TakenOver,
    /// The key is completed, by another token.
    CompletedByOther,
    /// The key is completed already, by this very token: only `complete` may be repeated.
    CompletedAlready,
    /// Nothing is stored under the key.
    Absent,
    /// No token was given and this transaction holds no claim on the key.
    NotHeldHere,
}

/// Why a lock is not, or no longer, the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockLost {
    /// The token's lease is over; nobody has taken the lock since.
    Expired,
    /// Another token has, or had, the lock after it, or the token never held it.
    NotHeld,
}

impl Error {
    pub(crate) fn duration(argument: &'static str, range: &'static str) -> Error {
        Error::Duration { argument, range }
    }

    /// The five characters of the SQLSTATE.
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Error::Null { .. } | Error::NullPart => "22004",
            Error::Empty { .. }
            | Error::TooLong { .. }
            | Error::Duration { .. }
            | Error::Count { .. }
            | Error::OtherLease
            | Error::NoLease
            | Error::NoParts
            | Error::NothingToRecover
            | Error::AuthorizerName => "22023",
            Error::WrongFunction { .. } => "42809",
            Error::NoFunction { .. } => "42883",
            Error::InProgress { .. } | Error::InProgressHere => "ID001",
            Error::FingerprintMismatch => "ID002",
            Error::OwnerMismatch => "ID004",
            Error::Abandoned { .. } => "ID005",
            Error::ClaimLost(_) => "ID003",
            Error::ResultTooLarge { .. } => "ID006",
            Error::ClaimOpen { .. } => "ID007",
            Error::LockLost(_) => "ID011",
            Error::LockTimeout => "55P03",
            Error::OtherVersion { .. } => "55000",
            Error::Corrupted { .. } => "XX001",
        }
    }

    /// The primary message.
    pub fn message(&self) -> String {
        match self {
            Error::Null { argument } => format!("{argument} must not be NULL"),
            Error::Empty { argument } => format!("{argument} must not be empty"),
            Error::TooLong { argument, .. } => format!("{argument} is too long"),
            Error::Duration { argument, range } | Error::Count { argument, range } => {
                format!("{argument} must be {range}")
            }
            Error::OtherLease => {
                "this transaction holds the key already, with another lease".to_string()
            }
            Error::NoLease => "the claim has no lease that could be extended".to_string(),
            Error::NullPart => "a part must not be NULL".to_string(),
            Error::NoParts => "there must be at least one part".to_string(),
            Error::NothingToRecover => {
                "the claim has no lease, so nothing of it could be recovered".to_string()
            }
            Error::WrongFunction { role, .. } => format!("{} cannot be called", role.name()),
            Error::NoFunction { role } => format!("{} does not exist", role.name()),
            Error::AuthorizerName => {
                "idem.authorizer must be the qualified name of a function".to_string()
            }
            Error::InProgress { .. } | Error::InProgressHere => {
                "the key is in progress".to_string()
            }
            Error::FingerprintMismatch => "the key belongs to a different request".to_string(),
            Error::OwnerMismatch => "the key belongs to somebody else".to_string(),
            Error::Abandoned { .. } => "an earlier attempt was abandoned".to_string(),
            Error::ClaimLost(_) => "the caller does not hold the claim on this key".to_string(),
            Error::ResultTooLarge { .. } => "the result is too large to be stored".to_string(),
            Error::ClaimOpen { .. } => {
                "the transaction holds a claim that is neither completed nor released".to_string()
            }
            Error::LockLost(_) => "the caller does not hold the lock".to_string(),
            Error::LockTimeout => "canceling statement due to lock timeout".to_string(),
            Error::OtherVersion { .. } => {
                "the library idem and its SQL objects are of different versions".to_string()
            }
            Error::Corrupted { .. } => "a record of idem is corrupted".to_string(),
        }
    }

    /// What exactly was found.
    pub fn detail(&self) -> Option<String> {
        match self {
            Error::TooLong { bytes, .. } => {
                Some(format!("It has {bytes} bytes; at most {} are allowed.", crate::limits::LONGEST_NAME))
            }
            Error::Duration { .. } => Some("A month counts as 30 days, a day as 24 hours.".to_string()),
            Error::WrongFunction { problem, .. } => Some((*problem).to_string()),
            Error::InProgress { retry_after: None } => {
                Some("Another transaction that is still open holds it.".to_string())
            }
            Error::InProgress { retry_after: Some(left) } => Some(format!(
                "Its holder has a lease of {} more seconds.",
                (left + 999_999) / 1_000_000
            )),
            Error::InProgressHere => Some("This transaction itself holds it.".to_string()),
            Error::Abandoned { attempt } => Some(format!("The lease of attempt {attempt} is over.")),
            Error::ClaimLost(lost) => Some(
                match lost {
                    Lost::TakenOver => "Another caller holds the key: the lease was over and somebody took over, or the token never held it.",
                    Lost::CompletedByOther => "The key is completed by another claim: somebody took over and finished, or the token never held it.",
                    Lost::CompletedAlready => "The key is completed already, by this token.",
                    Lost::Absent => "Nothing is stored under the key: the claim was released, rolled back, forgotten or has expired, or the token never held it.",
                    Lost::NotHeldHere => "No token was given and this transaction holds no claim on the key.",
                }
                .to_string(),
            ),
            Error::LockLost(lost) => Some(
                match lost {
                    LockLost::Expired => "Its lease is over.",
                    LockLost::NotHeld => "The lock was unlocked or taken by somebody else, or the token never held it.",
                }
                .to_string(),
            ),
            Error::ResultTooLarge { bytes, limit } => Some(format!(
                "result::text and body have {bytes} bytes; idem.max_result_size is {limit}. Nothing was written."
            )),
            Error::ClaimOpen { claims, .. } => Some(format!(
                "Claims without a lease that would be lost: {claims}. The transaction is rolled back, so a retry can run."
            )),
            Error::OtherVersion { found } | Error::Corrupted { found } => Some((*found).to_string()),
            _ => None,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Null { argument: "key" } | Error::Empty { argument: "key" } => {
                "Pass the identifier of the request, for instance its Idempotency-Key header or message id."
            }
            Error::TooLong { .. } => "Pass a digest of it instead.",
            Error::OtherLease => {
                "Repeat idem_begin with the lease of the first call, or change it with idem_extend."
            }
            Error::NoLease => {
                "A claim without a lease lives as long as its transaction. Give idem_begin a lease for work that outlives it."
            }
            Error::Null { argument: "token" } => {
                "Pass the token that lock_try or lock_acquire returned."
            }
            Error::NullPart => {
                "Replace a missing part by a text that stands for it, such as an empty one."
            }
            Error::NothingToRecover => {
                "If this transaction does not commit, all that it did is gone. Give idem_begin a lease for work that outlives the transaction."
            }
            Error::WrongFunction { role, .. } | Error::NoFunction { role } => role.shape(),
            Error::AuthorizerName => Role::Authorizer.shape(),
            Error::InProgress { .. } => "Try again later, or give a wait.",
            Error::InProgressHere => {
                "A function that idem_run runs, or a transaction that has called idem_begin, cannot run the same key again."
            }
            Error::FingerprintMismatch => "Use a new key for a new request.",
            Error::Abandoned { .. } => {
                "Find out what the earlier attempt did outside the database, then call again with takeover => true."
            }
            Error::ClaimLost(Lost::NotHeldHere) => {
                "Pass the token that idem_begin returned, or call idem_begin in this transaction first and act on its status."
            }
            Error::ClaimLost(_) => {
                "Roll back: what this transaction did must not take effect again. Call idem_begin to learn where the key stands."
            }
            Error::LockLost(_) => {
                "Roll back and take the lock again. If the work takes longer than the ttl, prolong it in time with lock_extend."
            }
            Error::ResultTooLarge { .. } => {
                "Store a reference to the result, or have a superuser raise idem.max_result_size."
            }
            Error::ClaimOpen { autocommit: true, .. } => {
                "In autocommit every statement is a transaction of its own: start one with BEGIN, or give idem_begin a lease."
            }
            Error::ClaimOpen { autocommit: false, .. } => {
                "Call idem_complete or idem_release before the transaction ends, or give idem_begin a lease if the work goes on after it."
            }
            Error::OtherVersion { .. } => "Run ALTER EXTENSION idem UPDATE, then reconnect.",
            Error::Corrupted { .. } => {
                "Change idem's tables by its functions only, at least while sessions use them. Otherwise restore what is stored from a backup."
            }
            _ => return None,
        };
        Some(hint.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contract_s_sqlstates() {
        for (error, state) in [
            (Error::ClaimLost(Lost::Absent), "ID003"),
            (Error::InProgress { retry_after: None }, "ID001"),
            (Error::InProgressHere, "ID001"),
            (Error::FingerprintMismatch, "ID002"),
            (Error::OwnerMismatch, "ID004"),
            (Error::Abandoned { attempt: 1 }, "ID005"),
            (Error::ResultTooLarge { bytes: 2, limit: 1 }, "ID006"),
            (Error::ClaimOpen { claims: 1, autocommit: false }, "ID007"),
            (Error::LockLost(LockLost::Expired), "ID011"),
            (Error::Null { argument: "key" }, "22004"),
            (Error::Empty { argument: "key" }, "22023"),
        ] {
            assert_eq!(error.sqlstate(), state);
        }
    }

    /// What was lost, to whom, is in DETAIL, and each case says something else.
    #[test]
    fn every_way_to_lose_a_claim_has_its_own_detail() {
        let ways = [
            Lost::TakenOver,
            Lost::CompletedByOther,
            Lost::CompletedAlready,
            Lost::Absent,
            Lost::NotHeldHere,
        ];
        let details: std::collections::HashSet<_> =
            ways.iter().map(|lost| Error::ClaimLost(*lost).detail()).collect();
        assert_eq!(details.len(), ways.len());
    }
}
