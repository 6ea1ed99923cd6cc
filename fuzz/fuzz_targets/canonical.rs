//! Two JSON texts have the same fingerprint if they are the same but for white space, and their values
//! under another name do not meet.
#![no_main]

use idem_core::canonical::Canonical;
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

fn fingerprint(value: &Value) -> [u8; 32] {
    let mut canonical = Canonical::default();
    canonical.value(value);
    canonical.fingerprint()
}

fuzz_target!(|text: &[u8]| {
    let Ok(value) = serde_json::from_slice::<Value>(text) else { return };
    let pretty = serde_json::to_string_pretty(&value).expect("a value can be written");
    let again: Value = serde_json::from_str(&pretty).expect("what was written can be read");
    assert_eq!(fingerprint(&value), fingerprint(&again));
    assert_ne!(fingerprint(&value), fingerprint(&json!([value])));
    assert_ne!(fingerprint(&json!({ "a": value })), fingerprint(&json!({ "b": value })));
});
