//! Numbers: what one run measured, medians and percentiles.

use std::time::Duration;

/// What one run of a contender measured; the medians of all its runs have the same shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Transactions (runs of the script) a second.
    pub rate: f64,
    /// Latency of one, in microseconds.
    pub p50: f64,
    pub p99: f64,
    /// Bytes of WAL, dead rows, bytes of tables and of indexes, for each transaction.
    pub wal: f64,
    pub dead: f64,
    pub heap: f64,
    pub index: f64,
    /// CPU time of the server's backends for each transaction, in microseconds.
    pub cpu: f64,
    /// Their instructions; 0 where the machine cannot count them.
    pub instructions: f64,
}

impl Sample {
    /// Rate and latencies of `latencies` (microseconds), measured within `elapsed`.
    pub fn of_latencies(latencies: &mut [f64], elapsed: Duration) -> Sample {
        Sample {
            rate: latencies.len() as f64 / elapsed.as_secs_f64(),
            p50: percentile(latencies, 50.0),
            p99: percentile(latencies, 99.0),
            ..Sample::default()
        }
    }

    /// The median of each number for itself.
    pub fn medians(samples: &[Sample]) -> Sample {
        let of = |number: fn(&Sample) -> f64| {
            percentile(&mut samples.iter().map(number).collect::<Vec<_>>(), 50.0)
        };
        Sample {
            rate: of(|s| s.rate),
            p50: of(|s| s.p50),
            p99: of(|s| s.p99),
            wal: of(|s| s.wal),
            dead: of(|s| s.dead),
            heap: of(|s| s.heap),
            index: of(|s| s.index),
            cpu: of(|s| s.cpu),
            instructions: of(|s| s.instructions),
        }
    }
}

/// The percentile of `numbers`, which are sorted by this; 0 of none.
pub fn percentile(numbers: &mut [f64], percent: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => 0.0,
        count => numbers[((count - 1) as f64 * percent / 100.0).round() as usize],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_numbers_that_were_measured() {
        assert_eq!(percentile(&mut [], 50.0), 0.0);
        assert_eq!(percentile(&mut [3.0, 1.0, 2.0], 50.0), 2.0);
        let mut hundred: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut hundred, 99.0), 100.0);
    }

    #[test]
    fn medians_are_taken_of_each_number_for_itself() {
        let sample = |rate, wal| Sample { rate, wal, ..Sample::default() };
        let median = Sample::medians(&[sample(1.0, 9.0), sample(2.0, 7.0), sample(3.0, 8.0)]);
        assert_eq!(median, sample(2.0, 8.0));
    }

    #[test]
    fn a_rate_is_counted_over_the_whole_time() {
        let sample = Sample::of_latencies(&mut [10.0, 30.0, 20.0], Duration::from_millis(1500));
        assert_eq!((sample.rate, sample.p50, sample.p99), (2.0, 20.0, 30.0));
    }
}
