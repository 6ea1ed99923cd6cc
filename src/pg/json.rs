//! Reading a jsonb value piece by piece, without recursion and without going through text.

use super::fmgr::Varlena;
use super::{check_for_interrupts, to_utf8};
use idem_core::Fingerprint;
use idem_core::canonical::Canonical;
use pgrx::pg_sys;
use pgrx::pg_sys::JsonbIteratorToken::*;
use pgrx::pg_sys::jbvType;
use std::ffi::CStr;

/// The canonical fingerprint of a jsonb (see `idem_core::canonical`).
pub fn fingerprint(json: Varlena) -> Fingerprint {
    let mut canonical = Canonical::default();
    // SAFETY: the value is a jsonb, detoasted with a 4-byte header that its container follows; the
    // iterator's state lives in the current memory context.
    unsafe {
        let jsonb = pg_sys::pg_detoast_datum(json.0.cast_mut_ptr());
        let container = jsonb.cast::<u8>().add(pg_sys::VARHDRSZ).cast();
        let mut iterator = pg_sys::JsonbIteratorInit(container);
        let mut value = std::mem::zeroed::<pg_sys::JsonbValue>();
        // A scalar at the top is wrapped into an array that is none.
        let mut is_scalar = false;
        let mut count = 0u32;
        loop {
            count = count.wrapping_add(1);
            if count.is_multiple_of(4096) {
                check_for_interrupts();
            }
            match pg_sys::JsonbIteratorNext(&mut iterator, &mut value, false) {
                WJB_DONE => return canonical.fingerprint(),
                WJB_BEGIN_ARRAY => match value.val.array.rawScalar {
                    true => is_scalar = true,
                    false => canonical.begin_array(value.val.array.nElems as u32),
                },
                WJB_BEGIN_OBJECT => canonical.begin_object(value.val.object.nPairs as u32),
                WJB_END_ARRAY if is_scalar => {}
                WJB_END_ARRAY | WJB_END_OBJECT => canonical.end(),
                WJB_KEY => canonical.key(&string(&value)),
                _ => scalar(&mut canonical, &value),
            }
        }
    }
}

/// # Safety
/// `value` is a scalar that the iterator returned.
unsafe fn scalar(canonical: &mut Canonical, value: &pg_sys::JsonbValue) {
    // SAFETY: the tag says which member of the union is set; a number's text is ASCII, palloc'd by
    // numeric_normalize.
    unsafe {
        match value.type_ {
            jbvType::jbvNull => canonical.null(),
            jbvType::jbvBool => canonical.bool(value.val.boolean),
            jbvType::jbvNumeric => {
                let text = pg_sys::numeric_normalize(value.val.numeric);
                canonical.number(&CStr::from_ptr(text).to_string_lossy());
                pg_sys::pfree(text.cast());
            }
            _ => canonical.string(&string(value)),
        }
    }
}

/// # Safety
/// `value` is a string that the iterator returned.
unsafe fn string(value: &pg_sys::JsonbValue) -> std::borrow::Cow<'_, [u8]> {
    // SAFETY: val points to len bytes of the jsonb, which outlives the call; for the empty string it
    // may point to its end.
    unsafe {
        let text = value.val.string;
        to_utf8(std::slice::from_raw_parts(text.val.cast(), text.len as usize))
    }
}
