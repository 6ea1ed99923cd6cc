//! SQL function calls: how arguments come in, results go out and errors are raised.
//!
//! pgrx's own function macros are not used here, for one reason: its guard turns an SQLSTATE that it
//! does not know into XX000 and can put a backtrace into DETAIL. [`enter`] is the guard of this
//! library: it runs the Rust body, catches every kind of failure (an [`Error`] of ours, a panic that
//! carries an error of PostgreSQL's) and raises it from a frame that owns nothing to drop, since
//! PostgreSQL leaves it by longjmp.

use super::raw::Raw;
use super::trap::{Trapped, trap};
use idem_core::duration::Interval;
use idem_core::error::Error;
use idem_core::{Micros, Moment, Token};
use pgrx::GucSetting;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;

/// Any varlena value (text, bytea, jsonb): its datum, readable as long as the current call runs.
#[derive(Clone, Copy)]
pub struct Varlena(pub(super) pg_sys::Datum);

impl Varlena {
    /// The payload bytes; fetched and decompressed if need be.
    pub fn bytes<'a>(self) -> &'a [u8] {
        let detoasted = self.detoasted().0.cast_mut_ptr();
        // SAFETY: the detoasted value lives in the datum itself or in the current memory context, both
        // of which outlive the call.
        unsafe {
            let length = pgrx::varsize_any_exhdr(detoasted);
            std::slice::from_raw_parts(pgrx::vardata_any(detoasted).cast(), length)
        }
    }

    /// The same value, neither compressed nor stored elsewhere: itself or a copy in the current memory
    /// context.
    pub fn detoasted(self) -> Varlena {
        let value = self.0.cast_mut_ptr();
        // SAFETY: the datum is a varlena; its first byte tells how it is stored.
        unsafe {
            if pgrx::varatt_is_4b_u(value)
                || (pgrx::varatt_is_1b(value) && !pgrx::varatt_is_1b_e(value))
            {
                return self;
            }
            Varlena(pg_sys::Datum::from(trap(|raw| raw.pg_detoast_datum_packed(value))))
        }
    }

    /// Number of bytes of the payload, without fetching or decompressing it.
    pub fn octets(self) -> u64 {
        // SAFETY: the datum is a varlena.
        let size = unsafe { pg_sys::toast_raw_datum_size(self.0) };
        (size - pg_sys::VARHDRSZ) as u64
    }

    /// For a jsonb: the number of bytes of its text form.
    pub fn jsonb_text_octets(self) -> u64 {
        // SAFETY: the datum is a jsonb, its container follows the 4-byte header that detoasting
        // ensures; the text is palloc'd and freed here.
        unsafe {
            let jsonb = pg_sys::pg_detoast_datum(self.0.cast_mut_ptr());
            let container = jsonb.cast::<u8>().add(pg_sys::VARHDRSZ).cast();
            let estimate = pgrx::varsize_any(jsonb) as c_int;
            let text = pg_sys::JsonbToCString(std::ptr::null_mut(), container, estimate);
            let octets = CStr::from_ptr(text).count_bytes() as u64;
            pg_sys::pfree(text.cast());
            octets
        }
    }

    /// A new varlena with these bytes, in the current memory context.
    pub fn new(bytes: &[u8]) -> Varlena {
        // SAFETY: the body owns nothing to drop and does not panic.
        unsafe { trap(|raw| Varlena::allocated(raw, bytes)) }
    }

    /// The value of a setting, copied, because it may be set again at any time; `None` if it is empty.
    pub fn of_setting(setting: &GucSetting<Option<CString>>) -> Option<Varlena> {
        // SAFETY: PostgreSQL keeps a null-terminated string or NULL there; it is copied at once.
        let text = unsafe { setting.as_ptr().read().as_ref().map(|text| CStr::from_ptr(text)) };
        text.filter(|text| !text.is_empty()).map(|text| Varlena::new(text.to_bytes()))
    }

    fn allocated(raw: Raw, bytes: &[u8]) -> Varlena {
        let size = pg_sys::VARHDRSZ + bytes.len();
        // SAFETY: palloc returns that many bytes; a value is shorter than 1 GB.
        unsafe {
            let place = raw.palloc(size).cast::<u8>();
            pgrx::set_varsize_4b(place.cast(), size as c_int);
            place.add(pg_sys::VARHDRSZ).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Varlena(pg_sys::Datum::from(place))
        }
    }
}

/// One column of a result row, or one result.
#[derive(Clone, Copy)]
pub enum Value {
    Null,
    /// What a function returning void returns, which is not NULL.
    Void,
    Bool(bool),
    Int(i32),
    Long(i64),
    Moment(Moment),
    Interval(Micros),
    Token(Token),
    Static(&'static str),
    Varlena(Varlena),
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Value {
        value.map_or(Value::Null, Into::into)
    }
}

impl From<Varlena> for Value {
    fn from(value: Varlena) -> Value {
        Value::Varlena(value)
    }
}

impl Value {
    /// The datum, which may point to this very value: C copies it into a row.
    pub(super) fn datum(&self, raw: Raw) -> Option<pg_sys::Datum> {
        Some(match self {
            Value::Null => return None,
            Value::Void => pg_sys::Datum::null(),
            Value::Bool(value) => pg_sys::Datum::from(*value),
            Value::Int(value) => pg_sys::Datum::from(*value),
            Value::Long(value) | Value::Moment(value) => pg_sys::Datum::from(*value),
            Value::Interval(micros) => {
                let interval = pg_sys::Interval { time: *micros, day: 0, month: 0 };
                // SAFETY: palloc returns memory aligned for every PostgreSQL type, of the size asked for.
                unsafe {
                    let place = raw.palloc(size_of_val(&interval)).cast::<pg_sys::Interval>();
                    place.write(interval);
                    pg_sys::Datum::from(place)
                }
            }
            Value::Token(token) => pg_sys::Datum::from(token.as_ptr()),
            Value::Static(text) => Varlena::allocated(raw, text.as_bytes()).0,
            Value::Varlena(value) => value.0,
        })
    }
}

/// The call in progress.
pub struct Call {
    fcinfo: pg_sys::FunctionCallInfo,
}

impl Call {
    /// The OID of the SQL function that was called.
    pub fn function(&self) -> pg_sys::Oid {
        // SAFETY: `enter` checked that flinfo is set.
        unsafe { (*(*self.fcinfo).flinfo).fn_oid }
    }

    fn argument(&self, index: usize) -> Option<pg_sys::Datum> {
        // SAFETY: `enter` checked the number of arguments; an index beyond is a panic.
        let argument = unsafe {
            let fcinfo = &*self.fcinfo;
            fcinfo.args.as_slice(fcinfo.nargs as usize)[index]
        };
        (!argument.isnull).then_some(argument.value)
    }

    /// A text, bytea or jsonb argument as it came.
    pub fn varlena(&self, index: usize) -> Option<Varlena> {
        self.argument(index).map(Varlena)
    }

    /// A text argument, detoasted.
    pub fn text(&self, index: usize) -> Option<Varlena> {
        self.varlena(index).map(Varlena::detoasted)
    }

    /// The bytes of a text or bytea argument.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        self.varlena(index).map(Varlena::bytes)
    }

    /// The elements of a text array argument; `None` is an element that is NULL.
    pub fn texts(&self, index: usize) -> Option<Vec<Option<&[u8]>>> {
        let array = self.argument(index)?;
        let (mut elements, mut nulls, mut count) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: the datum is an array of text, whose elements are varlenas with alignment i; the
        // arrays are allocated in the current memory context and outlive the call.
        unsafe {
            pg_sys::deconstruct_array(
                pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast(),
                pg_sys::TEXTOID,
                -1,
                false,
                pg_sys::TYPALIGN_INT as c_char,
                &mut elements,
                &mut nulls,
                &mut count,
            );
            let element = |i| (!*nulls.add(i)).then(|| Varlena(*elements.add(i)).bytes());
            Some((0..count as usize).map(element).collect())
        }
    }

    /// The OID of a regprocedure argument.
    pub fn oid(&self, index: usize) -> Option<pg_sys::Oid> {
        self.argument(index).map(|datum| pg_sys::Oid::from(datum.value() as u32))
    }

    pub fn token(&self, index: usize) -> Option<Token> {
        // SAFETY: a uuid datum points to 16 bytes.
        self.argument(index).map(|datum| unsafe { *datum.cast_mut_ptr::<Token>() })
    }

    pub fn interval(&self, index: usize) -> Option<Interval> {
        self.argument(index).map(|datum| {
            // SAFETY: an interval datum points to an Interval.
            let interval = unsafe { *datum.cast_mut_ptr::<pg_sys::Interval>() };
            Interval { months: interval.month, days: interval.day, micros: interval.time }
        })
    }

    pub fn int(&self, index: usize) -> Option<i32> {
        self.argument(index).map(|datum| datum.value() as i32)
    }

    pub fn bool(&self, index: usize) -> Option<bool> {
        self.argument(index).map(|datum| datum.value() != 0)
    }

    /// Returns a scalar, which is passed by value or a varlena.
    pub fn value(&self, value: Value) -> pg_sys::Datum {
        debug_assert!(!matches!(value, Value::Token(_)));
        // SAFETY: the body owns nothing to drop and does not panic; fcinfo is valid during the call.
        unsafe {
            let datum = trap(|raw| value.datum(raw));
            (*self.fcinfo).isnull = datum.is_none();
            datum.unwrap_or(pg_sys::Datum::null())
        }
    }

    /// Returns one row of the given shape.
    pub fn row<const N: usize>(
        &self,
        shape: &'static Shape<N>,
        values: [Value; N],
    ) -> pg_sys::Datum {
        let descriptor = shape.descriptor();
        // SAFETY: the descriptor has N columns of the types the values have; the body owns nothing to drop
        // and does not panic; fcinfo is valid during the call.
        unsafe {
            (*self.fcinfo).isnull = false;
            trap(|raw| {
                let (mut datums, mut nulls) = ([pg_sys::Datum::null(); N], [true; N]);
                for (i, value) in values.iter().enumerate() {
                    if let Some(datum) = value.datum(raw) {
                        (datums[i], nulls[i]) = (datum, false);
                    }
                }
                let tuple = raw.heap_form_tuple(descriptor, datums.as_ptr(), nulls.as_ptr());
                raw.HeapTupleHeaderGetDatum((*tuple).t_data)
            })
        }
    }

    /// For a set-returning function: says that the row just returned is the only one.
    pub fn only_row(&self, row: pg_sys::Datum) -> Result<pg_sys::Datum, Error> {
        self.set_done(pg_sys::ExprDoneCond::ExprSingleResult)?;
        Ok(row)
    }

    /// For a set-returning function: returns no row.
    pub fn no_row(&self) -> Result<pg_sys::Datum, Error> {
        self.set_done(pg_sys::ExprDoneCond::ExprEndResult)?;
        Ok(self.value(Value::Null))
    }

    fn set_done(&self, done: pg_sys::ExprDoneCond::Type) -> Result<(), Error> {
        // SAFETY: resultinfo, if it is set at all, points to a Node; its tag says which.
        unsafe {
            let info = (*self.fcinfo).resultinfo.cast::<pg_sys::ReturnSetInfo>();
            if info.is_null() || (*info).type_ != pg_sys::NodeTag::T_ReturnSetInfo {
                return Err(Error::OtherVersion {
                    found: "A set-returning function was declared as returning one row.",
                });
            }
            (*info).isDone = done;
        }
        Ok(())
    }
}

/// The columns of a composite result, by name and type; the descriptor is made once for a backend.
pub struct Shape<const N: usize> {
    columns: [(&'static CStr, pg_sys::BuiltinOid); N],
    descriptor: std::sync::OnceLock<Descriptor>,
}

struct Descriptor(pg_sys::TupleDesc);

// SAFETY: a backend has one thread; the statics that hold shapes need the markers all the same.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl<const N: usize> Shape<N> {
    pub const fn new(columns: [(&'static CStr, pg_sys::BuiltinOid); N]) -> Shape<N> {
        Shape { columns, descriptor: std::sync::OnceLock::new() }
    }

    fn descriptor(&self) -> pg_sys::TupleDesc {
        self.descriptor
            .get_or_init(|| {
                // SAFETY: the descriptor is built in TopMemoryContext, so that it lives as long as
                // the backend; an error on the way leaks a few bytes and leaves the cell empty.
                unsafe {
                    let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
                    let descriptor = pg_sys::CreateTemplateTupleDesc(N as c_int);
                    for (i, (name, kind)) in self.columns.iter().enumerate() {
                        pg_sys::TupleDescInitEntry(
                            descriptor,
                            i as i16 + 1,
                            name.as_ptr(),
                            (*kind).into(),
                            -1,
                            0,
                        );
                    }
                    let descriptor = pg_sys::BlessTupleDesc(descriptor);
                    pg_sys::MemoryContextSwitchTo(before);
                    Descriptor(descriptor)
                }
            })
            .0
    }
}

/// What [`raise`] hands to PostgreSQL.
#[derive(Clone, Copy)]
enum Failure {
    Report(Report),
    /// An error of PostgreSQL's, whole: see `trap`.
    Rethrow(*mut pg_sys::ErrorData),
}

/// An error in parts. The texts live in [`LAST_REPORT`].
#[derive(Clone, Copy)]
struct Report {
    sqlstate: c_int,
    message: *const c_char,
    detail: *const c_char,
    hint: *const c_char,
}

thread_local! {
    /// The texts of the last error raised: kept here, and not on a stack that longjmp leaves.
    static LAST_REPORT: RefCell<[Option<CString>; 3]> = const { RefCell::new([const { None }; 3]) };
}

impl Report {
    fn new(sqlstate: c_int, texts: [Option<String>; 3]) -> Report {
        let texts = texts.map(|text| text.and_then(|text| CString::new(text).ok()));
        LAST_REPORT.with_borrow_mut(|last| {
            *last = texts;
            let [message, detail, hint] =
                last.each_ref().map(|text| text.as_ref().map_or(null(), |text| text.as_ptr()));
            Report { sqlstate, message, detail, hint }
        })
    }

    fn of_error(error: &Error) -> Report {
        let texts = [Some(error.message()), error.detail(), error.hint()];
        Report::new(pack_sqlstate(error.sqlstate()), texts)
    }

    /// An error that PostgreSQL raised within a call of ours, or a panic (a bug) of our own.
    fn of_panic(payload: Box<dyn Any + Send>) -> Report {
        let internal = pg_sys::errcodes::PgSqlErrorCode::ERRCODE_INTERNAL_ERROR as c_int;
        let text = match payload.downcast::<CaughtError>() {
            Ok(caught) => {
                let (CaughtError::PostgresError(error)
                | CaughtError::ErrorReport(error)
                | CaughtError::RustPanic { ereport: error, .. }) = *caught;
                let owned = |text: Option<&str>| text.map(str::to_string);
                return Report::new(
                    error.sql_error_code() as c_int,
                    [Some(error.message().to_string()), owned(error.detail()), owned(error.hint())],
                );
            }
            Err(other) => match other.downcast::<String>() {
                Ok(text) => *text,
                Err(other) => other.downcast_ref::<&str>().unwrap_or(&"unknown").to_string(),
            },
        };
        Report::new(internal, [Some(format!("idem failed: {text}")), None, None])
    }
}

/// The packing of elog.h: six bits a character.
fn pack_sqlstate(state: &str) -> c_int {
    state
        .bytes()
        .rev()
        .fold(0, |packed, byte| (packed << 6) | (c_int::from(byte.wrapping_sub(b'0')) & 0x3F))
}

// Declared here because pgrx keeps them out of its bindings: they must be called from a frame
// without destructors, which is the case in `raise` only.
unsafe extern "C-unwind" {
    fn errstart(level: c_int, domain: *const c_char) -> bool;
    fn errcode(sqlstate: c_int) -> c_int;
    fn errmsg_internal(format: *const c_char, ...) -> c_int;
    fn errdetail_internal(format: *const c_char, ...) -> c_int;
    fn errhint(format: *const c_char, ...) -> c_int;
    fn errfinish(file: *const c_char, line: c_int, function: *const c_char);
    fn ReThrowError(error: *mut pg_sys::ErrorData) -> !;
}

/// Raises an error. The caller's frames up to PostgreSQL must own nothing to drop.
unsafe fn raise(failure: Failure) -> ! {
    let report = match failure {
        Failure::Report(report) => report,
        // SAFETY: `trap` copied the error into a memory context that is still alive.
        Failure::Rethrow(error) => unsafe { ReThrowError(error) },
    };
    let format = c"%s".as_ptr();
    // SAFETY: this is the expansion of ereport(ERROR, …) with constant formats; the texts live on in
    // LAST_REPORT. errfinish does not return at this level.
    unsafe {
        errstart(pgrx::PgLogLevel::ERROR as c_int, null());
        errcode(report.sqlstate);
        errmsg_internal(format, report.message);
        if !report.detail.is_null() {
            errdetail_internal(format, report.detail);
        }
        if !report.hint.is_null() {
            errhint(format, report.hint);
        }
        errfinish(null(), 0, null());
    }
    unreachable!("an error of level ERROR returned")
}

/// Runs `body` and keeps every failure; owns nothing when it returns.
#[inline(never)]
fn caught<T: Copy>(body: impl FnOnce() -> Result<T, Error>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Failure::Report(Report::of_error(&error))),
        Err(payload) => Err(match payload.downcast::<Trapped>() {
            Ok(trapped) => Failure::Rethrow(trapped.0),
            Err(payload) => Failure::Report(Report::of_panic(payload)),
        }),
    }
}

/// Runs the body of a callback that PostgreSQL called, raising what fails.
///
/// # Safety
/// The caller is an `extern` function called by PostgreSQL that owns nothing to drop.
pub(super) unsafe fn guarded(body: impl FnOnce() -> Result<(), Error> + Copy) {
    if let Err(failure) = caught(body) {
        // SAFETY: `body` is Copy, so this frame owns nothing to drop; the caller vouches for its own.
        unsafe { raise(failure) }
    }
}

/// Runs the body of an SQL function with `arguments` arguments, raising what fails.
///
/// # Safety
/// `fcinfo` is what PostgreSQL called the function with; the caller owns nothing to drop.
pub unsafe fn enter(
    fcinfo: pg_sys::FunctionCallInfo,
    arguments: i16,
    body: fn(&Call) -> Result<pg_sys::Datum, Error>,
) -> pg_sys::Datum {
    let outcome = caught(|| {
        // SAFETY: the caller vouches for fcinfo.
        let fits = unsafe { (*fcinfo).nargs == arguments && !(*fcinfo).flinfo.is_null() };
        if !fits {
            return Err(Error::OtherVersion {
                found: "The SQL function has another number of arguments than the library expects.",
            });
        }
        body(&Call { fcinfo }).inspect_err(crate::statistics::count_error)
    });
    match outcome {
        Ok(datum) => datum,
        // SAFETY: what is in this frame is Copy.
        Err(failure) => unsafe { raise(failure) },
    }
}

/// Makes Rust functions callable from SQL: `name(arguments) => body`.
macro_rules! sql_functions {
    ($($name:ident($arguments:literal) => $body:path;)*) => {$(
        const _: () = {
            #[unsafe(export_name = concat!("pg_finfo_", stringify!($name)))]
            extern "C-unwind" fn version() -> &'static pgrx::pg_sys::Pg_finfo_record {
                const V1: pgrx::pg_sys::Pg_finfo_record = pgrx::pg_sys::Pg_finfo_record { api_version: 1 };
                &V1
            }

            #[unsafe(export_name = stringify!($name))]
            unsafe extern "C-unwind" fn call(
                fcinfo: pgrx::pg_sys::FunctionCallInfo,
            ) -> pgrx::pg_sys::Datum {
                // SAFETY: PostgreSQL calls this with a valid fcinfo; nothing here needs dropping.
                unsafe { $crate::pg::fmgr::enter(fcinfo, $arguments, $body) }
            }
        };
    )*};
}
pub(crate) use sql_functions;
