//! The fingerprint of a JSON value: equal values have the same one.
//!
//! Two JSON values are equal if they differ only in the order of keys, white space and the
//! spelling of numbers (`1`, `1.0`, `1e0`). The order of arrays, null against an absent key and every
//! digit of a number count; strings are compared by code point, without Unicode normalisation.
//!
//! **Format.** The fingerprint is `SHA-256(4 ‖ value)`, where a value is encoded as one byte and what
//! follows it (all numbers 32-bit big-endian, all texts in UTF-8):
//!
//! | value | encoding |
//! |---|---|
//! | null, false, true | `z`, `f`, `t` |
//! | string | `s`, its length in bytes, its bytes |
//! | number | `n`, the length of its text, its text |
//! | array | `a`, the number of elements, the elements |
//! | object | `o`, the number of members, the members: key (length and bytes), value |
//!
//! Members are ordered by the length of their keys in bytes, then by their bytes; a key stands once
//! (of duplicates the last counts, which `jsonb` sees to). The text of a number is `0`, or: `-` if it
//! is negative, its digits without leading and trailing zeros, `e`, the power of ten by which these
//! digits, taken as an integer, are multiplied. So 1, 1.0 and 1e0 are `1e0`, -120.50 is `-1205e-1`.
//!
//! Every encoding can be told back into its value, so different values have different encodings.
//! It needs no recursion: depth is bounded by memory only. Frozen by the vectors below.

use crate::Fingerprint;
use sha2::{Digest, Sha256};

/// Takes a JSON value in pieces, in document order, and gives its fingerprint.
///
/// The pieces must form one value: every `begin_…` has its `end`, every member its `key` before its
/// value, every array and object as many elements as announced.
#[derive(Default)]
pub struct Canonical {
    encoded: Vec<u8>,
    open: Vec<Open>,
}

/// An array or object that has begun.
enum Open {
    Array,
    Object {
        /// Where the members begin, and where each key begins with its length.
        members: Vec<Member>,
    },
}

#[derive(Clone, Copy)]
struct Member {
    start: usize,
    key_length: usize,
}

impl Canonical {
    pub fn null(&mut self) {
        self.encoded.push(b'z');
    }

    pub fn bool(&mut self, value: bool) {
        self.encoded.push(if value { b't' } else { b'f' });
    }

    /// A string, in UTF-8.
    pub fn string(&mut self, value: &[u8]) {
        self.encoded.push(b's');
        self.text(value);
    }

    /// A number in decimal notation: digits, perhaps with a sign, a point and an exponent.
    pub fn number(&mut self, decimal: &str) {
        self.encoded.push(b'n');
        let canonical = canonical_number(decimal);
        self.text(canonical.as_bytes());
    }

    pub fn begin_array(&mut self, elements: u32) {
        self.encoded.push(b'a');
        self.encoded.extend(elements.to_be_bytes());
        self.open.push(Open::Array);
    }

    pub fn begin_object(&mut self, members: u32) {
        self.encoded.push(b'o');
        self.encoded.extend(members.to_be_bytes());
        self.open.push(Open::Object { members: Vec::new() });
    }

    /// The key of the next member, in UTF-8. Members may come in any order.
    pub fn key(&mut self, key: &[u8]) {
        if let Some(Open::Object { members }) = self.open.last_mut() {
            members.push(Member { start: self.encoded.len(), key_length: key.len() });
        }
        self.text(key);
    }

    /// The end of the array or object that began last.
    pub fn end(&mut self) {
        if let Some(Open::Object { members }) = self.open.pop() {
            self.order(members);
        }
    }

    /// A whole value: for tests and fuzzing, which have their JSON from serde_json.
    #[cfg(any(test, feature = "serde_json"))]
    pub fn value(&mut self, value: &serde_json::Value) {
        use serde_json::Value;
        match value {
            Value::Null => self.null(),
            Value::Bool(value) => self.bool(*value),
            Value::Number(number) => self.number(&number.to_string()),
            Value::String(text) => self.string(text.as_bytes()),
            Value::Array(elements) => {
                self.begin_array(elements.len() as u32);
                elements.iter().for_each(|element| self.value(element));
                self.end();
            }
            Value::Object(members) => {
                self.begin_object(members.len() as u32);
                for (key, value) in members {
                    self.key(key.as_bytes());
                    self.value(value);
                }
                self.end();
            }
        }
    }

    /// The fingerprint of the value.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update([4]);
        hash.update(&self.encoded);
        hash.finalize().into()
    }

    fn text(&mut self, text: &[u8]) {
        // A text value in PostgreSQL is shorter than 1 GB, so its length fits.
        self.encoded.extend((text.len() as u32).to_be_bytes());
        self.encoded.extend(text);
    }

    /// Puts the members of an object, which end where the encoding ends, in their order. jsonb keeps
    /// them in it, unless the database's encoding is not UTF-8.
    fn order(&mut self, mut members: Vec<Member>) {
        let encoded = &self.encoded;
        let key = |member: &Member| {
            let start = member.start + size_of::<u32>();
            (member.key_length, &encoded[start..start + member.key_length])
        };
        if members.is_sorted_by_key(key) {
            return;
        }
        let first = members[0].start;
        let ends: Vec<usize> =
            members.iter().skip(1).map(|next| next.start).chain([encoded.len()]).collect();
        let mut spans: Vec<(Member, usize)> = members.drain(..).zip(ends).collect();
        spans.sort_by(|(a, _), (b, _)| key(a).cmp(&key(b)));
        let ordered: Vec<u8> = spans
            .iter()
            .flat_map(|(member, end)| encoded[member.start..*end].iter().copied())
            .collect();
        self.encoded.truncate(first);
        self.encoded.extend(ordered);
    }
}

fn canonical_number(decimal: &str) -> String {
    let (mantissa, exponent) = decimal.split_once(['e', 'E']).unwrap_or((decimal, "0"));
    let (sign, digits) = match mantissa.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", mantissa.strip_prefix('+').unwrap_or(mantissa)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all = [whole, fraction].concat();
    let significant = all.trim_start_matches('0').trim_end_matches('0');
    if significant.is_empty() {
        return "0".to_string();
    }
    let dropped = all.len() - all.trim_end_matches('0').len();
    // jsonb's numbers have at most some 150,000 digits and are written without an exponent.
    let exponent: i64 = exponent.parse().unwrap_or(0);
    let power = exponent + dropped as i64 - fraction.len() as i64;
    format!("{sign}{significant}e{power}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    fn fingerprint(value: &Value) -> Fingerprint {
        let mut canonical = Canonical::default();
        canonical.value(value);
        canonical.fingerprint()
    }

    fn hex(print: Fingerprint) -> String {
        print.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn parse(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    /// Computed once with another implementation and frozen.
    #[test]
    fn fingerprints_are_frozen() {
        let vectors: [(&str, &str); 13] = include!("canonical_vectors.in");
        for (json, expected) in vectors {
            assert_eq!(hex(fingerprint(&parse(json))), expected, "{json}");
        }
    }

    #[test]
    fn numbers_are_compared_by_value_and_exactly() {
        for (a, b) in [
            ("1", "1.0"),
            ("1", "1e0"),
            ("100", "1e2"),
            ("0.001", "1E-3"),
            ("-1.50", "-15e-1"),
            ("0", "0.000"),
            ("0", "-0"),
            ("0", "0e5"),
            ("123456789012345678901234567890", "1.23456789012345678901234567890e29"),
        ] {
            assert_eq!(canonical_number(a), canonical_number(b), "{a} and {b}");
        }
        for (a, b) in [
            ("1", "-1"),
            ("1", "10"),
            ("1", "0.1"),
            ("9007199254740993", "9007199254740992"),
            ("0.1", "0.10000000000000001"),
            ("1e400", "1e401"),
        ] {
            assert_ne!(canonical_number(a), canonical_number(b), "{a} and {b}");
        }
    }

    #[test]
    fn what_differs_has_another_fingerprint() {
        let different = [
            "null",
            "false",
            "true",
            "0",
            "1",
            "\"\"",
            "\"0\"",
            "\"null\"",
            "[]",
            "{}",
            "[null]",
            "[[]]",
            "[1]",
            "[1,2]",
            "[2,1]",
            "[[1],2]",
            "[[1,2]]",
            "{\"a\":null}",
            "{\"a\":1}",
            "{\"b\":1}",
            "{\"a\":1,\"b\":2}",
            "{\"a\":{\"b\":2}}",
            "{\"\":1}",
            "\"a\"",
            "\" a\"",
            "\"\u{e9}\"",
            "\"e\u{301}\"",
        ];
        let mut seen = std::collections::HashMap::new();
        for json in different {
            if let Some(other) = seen.insert(fingerprint(&parse(json)), json) {
                panic!("{json} meets {other}");
            }
        }
    }

    #[test]
    fn the_order_of_members_does_not_count() {
        let mut forth = Canonical::default();
        let mut back = Canonical::default();
        let keys = ["a", "b", "ab", "\u{e9}", ""];
        forth.begin_object(keys.len() as u32);
        back.begin_object(keys.len() as u32);
        for key in keys {
            forth.key(key.as_bytes());
            forth.string(key.as_bytes());
        }
        for key in keys.iter().rev() {
            back.key(key.as_bytes());
            back.string(key.as_bytes());
        }
        forth.end();
        back.end();
        assert_eq!(forth.fingerprint(), back.fingerprint());
    }

    #[test]
    fn a_hundred_thousand_levels_are_no_problem() {
        let mut canonical = Canonical::default();
        for _ in 0..100_000 {
            canonical.begin_array(1);
        }
        canonical.null();
        for _ in 0..100_000 {
            canonical.end();
        }
        canonical.fingerprint();
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (-50i64..50).prop_map(Value::from),
            "[ab\u{e9}]{0,3}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[ab]{0,2}", inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>())),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_same_fingerprint_if_and_only_if_equal(a in value(), b in value()) {
            prop_assert_eq!(fingerprint(&a) == fingerprint(&b), a == b);
        }

        #[test]
        fn a_changed_member_changes_the_fingerprint(a in value(), b in value()) {
            let (inside_a, inside_b) = (json!({"x": [a]}), json!({"x": [b]}));
            prop_assert_eq!(fingerprint(&inside_a) == fingerprint(&inside_b), inside_a == inside_b);
        }

        #[test]
        fn any_spelling_of_a_number_is_the_same(digits in "[1-9][0-9]{0,20}", shift in 0usize..20) {
            let plain = canonical_number(&digits);
            let zeros = "0".repeat(shift);
            prop_assert_eq!(&plain, &canonical_number(&format!("000{digits}.{zeros}")));
            prop_assert_eq!(&plain, &canonical_number(&format!("{digits}{zeros}e-{shift}")));
            prop_assert_eq!(&plain, &canonical_number(&format!("0.{zeros}{digits}E{}", shift + digits.len())));
        }
    }
}
