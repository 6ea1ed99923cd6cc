//! The claims that the current transaction holds, through savepoints.
//!
//! A claim without a lease is written nowhere until it is completed, so the backend has to remember
//! it, and has to forget it, or remember that it is open again, when a savepoint is rolled back.
//! [`Held`] is that memory. It keeps a journal of changes, each marked with the (sub)transaction that
//! made it, as PostgreSQL does for its own resources:
//!
//! - when a subtransaction aborts, its changes are undone, last first;
//! - when it commits, its changes become its parent's;
//! - when the transaction ends, all is forgotten.
//!
//! Invariants: the changes of one subtransaction are contiguous at the end of the journal while it
//! is the innermost one; a key has at most one open claim; a claim that ended can only open again by
//! undoing its end.

use crate::identity::Identity;
use crate::{Fingerprint, Micros, Moment, Token};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A claim that this transaction made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub identity: Identity,
    pub token: Token,
    pub fingerprint: Option<Fingerprint>,
    pub owner: Option<Vec<u8>>,
    /// `None`: the claim belongs to the transaction and must end before it commits.
    pub lease: Option<Micros>,
    pub attempt: i32,
    pub created_at: Moment,
    /// That of the claim it took over, whose row a purge may remove meanwhile. A claim on a lease has its own row.
    pub checkpoint: Option<Vec<u8>>,
    /// Whether a row that counts no more (expired, or taken over) lies in the tables and goes when
    /// this claim ends. Never for a claim on a lease: it replaced the row when it was made.
    pub stale_row: bool,
}

/// How a claim ended within its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Completed,
    Released,
}

struct Entry {
    claim: Claim,
    end: Option<End>,
    /// The claim on the same key before this one, for when this one is undone.
    previous: Option<usize>,
}

#[derive(Clone, Copy)]
enum Change {
    /// The last entry was added.
    Claimed,
    /// The entry with this index ended.
    Ended(usize),
}

/// Identifies a subtransaction within its transaction (PostgreSQL's `SubTransactionId`).
pub type Subtransaction = u32;

/// Hashes digests, which are evenly spread already: a part of a SHA-256 that nobody can aim.
#[derive(Default)]
struct OfDigest(u64);

impl Hasher for OfDigest {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    // The length of the digest, which is always the same.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The memory for so many claims is kept for the next transaction.
const KEPT: usize = 64;

/// The claims of one transaction. See the head of the file.
#[derive(Default)]
pub struct Held {
    entries: Vec<Entry>,
    latest: HashMap<[u8; 16], usize, BuildHasherDefault<OfDigest>>,
    journal: Vec<(Subtransaction, Change)>,
    unfinished: usize,
}

impl Held {
    /// Remembers a claim just made in subtransaction `sub`. The key must have no open one.
    pub fn claim(&mut self, claim: Claim, sub: Subtransaction) {
        debug_assert!(self.open(&claim.identity).is_none());
        let index = self.entries.len();
        let previous = self.latest.insert(claim.identity.digest, index);
        self.unfinished += usize::from(claim.lease.is_none());
        self.entries.push(Entry { claim, end: None, previous });
        self.journal.push((sub, Change::Claimed));
    }

    /// The newest claim of this transaction on the key, and how it ended if it did.
    pub fn latest(&self, identity: &Identity) -> Option<(&Claim, Option<End>)> {
        let entry = &self.entries[*self.latest.get(&identity.digest)?];
        Some((&entry.claim, entry.end))
    }

    /// The open claim of this transaction on the key.
    pub fn open(&self, identity: &Identity) -> Option<&Claim> {
        match self.latest(identity) {
            Some((claim, None)) => Some(claim),
            _ => None,
        }
    }

    /// Marks the open claim on the key, if there is one, as ended in subtransaction `sub`.
    pub fn end(&mut self, identity: &Identity, end: End, sub: Subtransaction) {
        let Some(&index) = self.latest.get(&identity.digest) else {
            return;
        };
        let entry = &mut self.entries[index];
        if entry.end.is_none() {
            entry.end = Some(end);
            self.unfinished -= usize::from(entry.claim.lease.is_none());
            self.journal.push((sub, Change::Ended(index)));
        }
    }

    /// How many open claims have no lease: with any, the transaction must not commit.
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Subtransaction `sub` committed into `parent`.
    pub fn subcommit(&mut self, sub: Subtransaction, parent: Subtransaction) {
        for (owner, _) in self.journal.iter_mut().rev().take_while(|(owner, _)| *owner == sub) {
            *owner = parent;
        }
    }

    /// Subtransaction `sub` was rolled back.
    pub fn subabort(&mut self, sub: Subtransaction) {
        while let Some((_, change)) = self.journal.pop_if(|(owner, _)| *owner == sub) {
            match change {
                Change::Claimed => {
                    if let Some(entry) = self.entries.pop() {
                        let digest = entry.claim.identity.digest;
                        match entry.previous {
                            Some(previous) => self.latest.insert(digest, previous),
                            None => self.latest.remove(&digest),
                        };
                        // Its end, if any, was undone before: changes are undone last first.
                        self.unfinished -= usize::from(entry.claim.lease.is_none());
                    }
                }
                Change::Ended(index) => {
                    let entry = &mut self.entries[index];
                    entry.end = None;
                    self.unfinished += usize::from(entry.claim.lease.is_none());
                }
            }
        }
    }

    /// The transaction ended, in whatever way.
    pub fn clear(&mut self) {
        if self.entries.capacity() > KEPT || self.journal.capacity() > 2 * KEPT {
            *self = Held::default();
        } else if !self.journal.is_empty() {
            self.entries.clear();
            self.latest.clear();
            self.journal.clear();
            self.unfinished = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Domain;
    use proptest::prelude::*;

    fn key(name: &str) -> Identity {
        Identity::new(Domain::Key, b"", name.as_bytes())
    }

    fn claim(name: &str, token: u8, lease: Option<Micros>) -> Claim {
        Claim {
            identity: key(name),
            token: [token; 16],
            fingerprint: None,
            owner: None,
            lease,
            attempt: 1,
            created_at: 0,
            checkpoint: None,
            stale_row: false,
        }
    }

    #[test]
    fn a_claim_made_in_a_savepoint_goes_with_it_and_one_made_before_stays() {
        let mut held = Held::default();
        held.claim(claim("before", 1, None), 1);
        held.claim(claim("inside", 2, None), 2);
        held.subabort(2);
        assert!(held.open(&key("before")).is_some());
        assert!(held.open(&key("inside")).is_none());
        assert_eq!(held.unfinished(), 1);
    }

    #[test]
    fn a_completion_rolled_back_leaves_the_claim_open() {
        for end in [End::Completed, End::Released] {
            let mut held = Held::default();
            held.claim(claim("k", 1, None), 1);
            held.end(&key("k"), end, 2);
            assert!(held.open(&key("k")).is_none());
            assert_eq!(held.unfinished(), 0);
            held.subabort(2);
            assert!(held.open(&key("k")).is_some());
            assert_eq!(held.unfinished(), 1);
        }
    }

    #[test]
    fn what_a_released_savepoint_did_goes_with_its_parent() {
        let mut held = Held::default();
        held.claim(claim("k", 1, None), 3);
        held.subcommit(3, 2);
        held.subabort(2);
        assert!(held.open(&key("k")).is_none());
        assert_eq!(held.unfinished(), 0);
    }

    #[test]
    fn claimed_again_after_a_release_both_can_be_undone() {
        let mut held = Held::default();
        held.claim(claim("k", 1, None), 1);
        held.end(&key("k"), End::Released, 2);
        held.claim(claim("k", 2, None), 3);
        assert_eq!(held.open(&key("k")).unwrap().token, [2; 16]);
        held.subabort(3);
        assert_eq!(held.latest(&key("k")).unwrap().1, Some(End::Released));
        held.subabort(2);
        assert_eq!(held.open(&key("k")).unwrap().token, [1; 16]);
    }

    #[test]
    fn a_claim_on_a_lease_may_outlive_the_transaction() {
        let mut held = Held::default();
        held.claim(claim("k", 1, Some(1)), 1);
        assert_eq!(held.unfinished(), 0);
        held.end(&key("k"), End::Completed, 1);
        assert_eq!(held.unfinished(), 0);
    }

    #[test]
    fn ending_what_is_not_held_changes_nothing() {
        let mut held = Held::default();
        held.end(&key("k"), End::Completed, 1);
        held.claim(claim("k", 1, None), 1);
        held.end(&key("k"), End::Completed, 1);
        held.end(&key("k"), End::Released, 1);
        assert_eq!(held.latest(&key("k")).unwrap().1, Some(End::Completed));
        held.clear();
        assert!(held.latest(&key("k")).is_none());
    }

    /// One step of a transaction.
    #[derive(Clone, Debug)]
    enum Step {
        Claim(u8, bool),
        End(u8, bool),
        Savepoint,
        Release,
        Rollback,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..4u8, any::<bool>()).prop_map(|(k, lease)| Step::Claim(k, lease)),
            3 => (0..4u8, any::<bool>()).prop_map(|(k, done)| Step::End(k, done)),
            2 => Just(Step::Savepoint),
            1 => Just(Step::Release),
            2 => Just(Step::Rollback),
        ]
    }

    /// The model: a stack of whole copies of the state, one for each savepoint.
    type Model = [Option<(u8, bool, Option<End>)>; 4];

    proptest! {
        #[test]
        fn agrees_with_a_stack_of_copies(steps in prop::collection::vec(step(), 0..60)) {
            let mut held = Held::default();
            let mut now: Model = [None; 4];
            let mut saved: Vec<(Subtransaction, Model)> = Vec::new();
            let (mut sub, mut next_sub, mut next_token) = (1, 2, 0u8);
            for step in steps {
                match step {
                    Step::Claim(k, lease) => {
                        let open = matches!(now[k as usize], Some((_, _, None)));
                        if !open {
                            next_token = next_token.wrapping_add(1);
                            now[k as usize] = Some((next_token, lease, None));
                            held.claim(claim(&k.to_string(), next_token, lease.then_some(1)), sub);
                        }
                    }
                    Step::End(k, done) => {
                        let end = if done { End::Completed } else { End::Released };
                        if let Some((_, _, how @ None)) = &mut now[k as usize] {
                            *how = Some(end);
                        }
                        held.end(&key(&k.to_string()), end, sub);
                    }
                    Step::Savepoint => {
                        saved.push((sub, now));
                        sub = next_sub;
                        next_sub += 1;
                    }
                    Step::Release => {
                        if let Some((parent, _)) = saved.pop() {
                            held.subcommit(sub, parent);
                            sub = parent;
                        }
                    }
                    Step::Rollback => {
                        if let Some((parent, before)) = saved.pop() {
                            held.subabort(sub);
                            sub = parent;
                            now = before;
                        }
                    }
                }
                let unfinished = now
                    .iter()
                    .filter(|slot| matches!(slot, Some((_, false, None))))
                    .count();
                prop_assert_eq!(held.unfinished(), unfinished);
                for (k, slot) in now.iter().enumerate() {
                    let found = held.latest(&key(&k.to_string()));
                    let found = found.map(|(c, end)| (c.token[0], c.lease.is_some(), end));
                    prop_assert_eq!(found, *slot);
                }
            }
        }
    }
}
