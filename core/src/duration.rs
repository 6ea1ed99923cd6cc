//! Intervals as fixed lengths of time.
//!
//! PostgreSQL's `interval` has months, days and microseconds, and means different lengths at
//! different dates. A lease or a ttl is a fixed length: a day is 24 hours, a month 30 days.

use crate::Micros;
use crate::error::Error;

/// Microseconds in a second.
pub const SECOND: Micros = 1_000_000;
/// Microseconds in a day of 24 hours.
pub const DAY: Micros = 86_400 * SECOND;
/// The longest duration that any argument or setting may give.
pub const LONGEST: Micros = 3_650 * DAY;

/// The three fields of a PostgreSQL `interval`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    pub months: i32,
    pub days: i32,
    pub micros: i64,
}

impl Interval {
    /// The fixed length; an infinite interval (PostgreSQL 17) is far outside every range.
    fn length(self) -> i128 {
        let days = i128::from(self.months) * 30 + i128::from(self.days);
        days * i128::from(DAY) + i128::from(self.micros)
    }

    /// A lease, a ttl: above 0, at most 3,650 days. Else 22023.
    pub fn positive(self, argument: &'static str) -> Result<Micros, Error> {
        let length = self.length();
        if length <= 0 || length > i128::from(LONGEST) {
            return Err(Error::duration(argument, "above 0 and at most 3650 days"));
        }
        Ok(length as Micros)
    }

    /// A wait: from 0, at most 3,650 days. Else 22023.
    pub fn not_negative(self, argument: &'static str) -> Result<Micros, Error> {
        if self.length() == 0 {
            return Ok(0);
        }
        self.positive(argument).map_err(|_| Error::duration(argument, "from 0 to 3650 days"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(months: i32, days: i32, micros: i64) -> Interval {
        Interval { months, days, micros }
    }

    #[test]
    fn a_month_is_30_days_and_a_day_24_hours() {
        assert_eq!(of(1, 0, 0).positive("ttl").unwrap(), 30 * DAY);
        assert_eq!(of(12, 5, 7).positive("ttl").unwrap(), 365 * DAY + 7);
        assert_eq!(of(1, -30, 1).positive("ttl").unwrap(), 1);
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(of(0, 3650, 0).positive("ttl").unwrap(), LONGEST);
        assert!(of(0, 3650, 1).positive("ttl").is_err());
        assert_eq!(of(0, 0, 1).positive("ttl").unwrap(), 1);
        assert!(of(0, 0, 0).positive("ttl").is_err());
        assert!(of(0, 0, -1).positive("ttl").is_err());
        assert_eq!(of(0, 0, 0).not_negative("wait").unwrap(), 0);
        assert!(of(0, 0, -1).not_negative("wait").is_err());
        assert_eq!(of(0, 3650, 0).not_negative("wait").unwrap(), LONGEST);
        assert!(of(0, 3650, 1).not_negative("wait").is_err());
    }

    #[test]
    fn infinity_and_overflow_are_refused() {
        for extreme in [
            of(i32::MAX, i32::MAX, i64::MAX),
            of(i32::MIN, i32::MIN, i64::MIN),
            of(i32::MAX, 0, 0),
            of(0, i32::MAX, 0),
            of(0, 0, i64::MAX),
        ] {
            assert!(extreme.positive("lease").is_err());
            assert!(extreme.not_negative("wait").is_err());
        }
    }

    #[test]
    fn the_error_names_the_argument() {
        let error = of(0, 0, 0).positive("lease").unwrap_err();
        assert_eq!(error.sqlstate(), "22023");
        assert!(error.message().contains("lease"));
    }
}
