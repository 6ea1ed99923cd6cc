//! Counts that hold only if the transaction commits, through savepoints.
//!
//! [`Tally`] keeps one row of counts for each (sub)transaction that counted something, the innermost
//! last. When a subtransaction commits, its row is added to its parent's; when it aborts, it is
//! dropped. So its size follows the depth of savepoints, not what is counted.

use crate::held::Subtransaction;

/// What one transaction has counted so far, in `N` counters.
#[derive(Default)]
pub struct Tally<const N: usize> {
    rows: Vec<(Subtransaction, [u64; N])>,
}

impl<const N: usize> Tally<N> {
    /// Counts one more in subtransaction `sub`, the innermost one.
    pub fn count(&mut self, counter: usize, sub: Subtransaction) {
        self.row(sub)[counter] += 1;
    }

    /// Subtransaction `sub` committed into `parent`.
    pub fn subcommit(&mut self, sub: Subtransaction, parent: Subtransaction) {
        if let Some((_, counts)) = self.rows.pop_if(|(owner, _)| *owner == sub) {
            for (into, count) in self.row(parent).iter_mut().zip(counts) {
                *into += count;
            }
        }
    }

    /// Subtransaction `sub` was rolled back.
    pub fn subabort(&mut self, sub: Subtransaction) {
        self.rows.pop_if(|(owner, _)| *owner == sub);
    }

    /// The transaction ended: what it counted, if anything; then it starts anew.
    pub fn take(&mut self) -> Option<[u64; N]> {
        // Every subtransaction has ended, so there is at most the transaction's own row.
        let counts = self.rows.pop().map(|(_, counts)| counts);
        self.rows.clear();
        counts
    }

    /// The row of `sub`, which is the innermost that counts.
    fn row(&mut self, sub: Subtransaction) -> &mut [u64; N] {
        if self.rows.last().is_none_or(|(owner, _)| *owner != sub) {
            self.rows.push((sub, [0; N]));
        }
        let last = self.rows.len() - 1;
        &mut self.rows[last].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_rolled_back_savepoint_takes_its_counts_along() {
        let mut tally = Tally::<2>::default();
        tally.count(0, 1);
        tally.count(0, 2);
        tally.count(1, 3);
        tally.subcommit(3, 2);
        tally.subabort(2);
        assert_eq!(tally.take(), Some([1, 0]));
    }

    #[test]
    fn a_released_savepoint_counts_for_its_parent_which_counted_nothing() {
        let mut tally = Tally::<2>::default();
        tally.count(1, 3);
        tally.subcommit(3, 2);
        tally.subcommit(2, 1);
        assert_eq!(tally.take(), Some([0, 1]));
    }

    #[test]
    fn the_next_transaction_starts_from_nothing() {
        let mut tally = Tally::<1>::default();
        tally.count(0, 1);
        assert_eq!(tally.take(), Some([1]));
        assert_eq!(tally.take(), None);
    }

    /// One step of a transaction.
    #[derive(Clone, Debug)]
    enum Step {
        Count(usize),
        Savepoint,
        Release,
        Rollback,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..3usize).prop_map(Step::Count),
            2 => Just(Step::Savepoint),
            1 => Just(Step::Release),
            1 => Just(Step::Rollback),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_stack_of_copies(steps in prop::collection::vec(step(), 0..60)) {
            let mut tally = Tally::<3>::default();
            let mut now = [0; 3];
            let mut saved: Vec<(Subtransaction, [u64; 3])> = Vec::new();
            let (mut sub, mut next) = (1, 2);
            for step in steps {
                match step {
                    Step::Count(counter) => {
                        tally.count(counter, sub);
                        now[counter] += 1;
                    }
                    Step::Savepoint => {
                        saved.push((sub, now));
                        sub = next;
                        next += 1;
                    }
                    Step::Release => {
                        if let Some((parent, _)) = saved.pop() {
                            tally.subcommit(sub, parent);
                            sub = parent;
                        }
                    }
                    Step::Rollback => {
                        if let Some((parent, before)) = saved.pop() {
                            tally.subabort(sub);
                            sub = parent;
                            now = before;
                        }
                    }
                }
            }
            // COMMIT commits what is open, innermost first.
            for (parent, _) in saved.into_iter().rev() {
                tally.subcommit(sub, parent);
                sub = parent;
            }
            prop_assert_eq!(tally.take().unwrap_or_default(), now);
        }
    }
}
