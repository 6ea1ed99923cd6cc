//! Calling functions of users: with the caller's rights, their errors arriving whole.

use super::fmgr::Varlena;
use super::trap::trap;
use idem_core::error::{Error, Role};
use pgrx::pg_sys;
use std::ffi::CStr;
use std::ptr::null_mut;

/// A function that was found fit to be called.
pub struct UserFunction(pg_sys::Oid);

impl UserFunction {
    /// A function of one jsonb that returns one jsonb. 42883 if it does not exist, 42809 if it has
    /// another shape or would not be called for a NULL (`null_request`), 42501 if the caller has no
    /// right to execute it.
    pub fn of_request(function: pg_sys::Oid, null_request: bool) -> Result<UserFunction, Error> {
        const JSONB: pg_sys::Oid = pg_sys::JSONBOID;
        with_definition(function, Role::Work, |definition| {
            // SAFETY: proargtypes holds pronargs OIDs.
            let takes_jsonb = definition.pronargs == 1
                && unsafe { *definition.proargtypes.values.as_ptr() } == JSONB;
            if definition.prokind as u8 != pg_sys::PROKIND_FUNCTION {
                return Err("It is a procedure, an aggregate or a window function.");
            }
            if definition.proretset || definition.prorettype != JSONB || !takes_jsonb {
                return Err("Its argument or its result is not one jsonb.");
            }
            if definition.proisstrict && null_request {
                return Err("It is STRICT and the request is NULL, so it would never run.");
            }
            Ok(())
        })?;
        check_execute(function);
        Ok(UserFunction(function))
    }

    /// The function of two texts that returns a boolean, by its qualified name. 22023 if the name is not
    /// qualified, 42883 if there is none, 42501 if the caller has no right to execute it.
    pub fn authorizer(name: &CStr) -> Result<UserFunction, Error> {
        // SAFETY: the name is a valid C string; the list of its parts is allocated in the current
        // memory context. With a qualified name the search_path has no say.
        let function = unsafe {
            #[cfg(feature = "pg15")]
            let parts = pg_sys::stringToQualifiedNameList(name.as_ptr());
            #[cfg(not(feature = "pg15"))]
            let parts = pg_sys::stringToQualifiedNameList(name.as_ptr(), null_mut());
            if (*parts).length < 2 {
                return Err(Error::AuthorizerName);
            }
            let arguments = [pg_sys::TEXTOID, pg_sys::TEXTOID];
            pg_sys::LookupFuncName(parts, 2, arguments.as_ptr(), true)
        };
        if function == pg_sys::InvalidOid {
            return Err(Error::NoFunction { role: Role::Authorizer });
        }
        with_definition(function, Role::Authorizer, |definition| {
            let fits = !definition.proretset && definition.prorettype == pg_sys::BOOLOID;
            if fits { Ok(()) } else { Err("Its result is not one boolean.") }
        })?;
        check_execute(function);
        Ok(UserFunction(function))
    }

    /// Calls the function with one argument.
    pub fn call(&self, argument: Option<Varlena>) -> Option<Varlena> {
        self.invoke([argument]).map(Varlena)
    }

    /// Calls the function with two arguments and returns what it says, NULL as false.
    pub fn ask(&self, arguments: [Varlena; 2]) -> bool {
        self.invoke(arguments.map(Some)).is_some_and(|datum| datum.value() != 0)
    }

    fn invoke<const N: usize>(&self, arguments: [Option<Varlena>; N]) -> Option<pg_sys::Datum> {
        // SAFETY: the call information has room for N arguments behind its fixed part (as
        // LocalFCInfo has); the function's own address is called through `trap`, so that its errors
        // arrive whole.
        unsafe {
            let size = size_of::<pg_sys::FunctionCallInfoBaseData>()
                + N * size_of::<pg_sys::NullableDatum>();
            let fcinfo = pg_sys::palloc0(size).cast::<pg_sys::FunctionCallInfoBaseData>();
            let flinfo = pg_sys::palloc0(size_of::<pg_sys::FmgrInfo>()).cast::<pg_sys::FmgrInfo>();
            pg_sys::fmgr_info(self.0, flinfo);
            (*fcinfo).flinfo = flinfo;
            (*fcinfo).fncollation = pg_sys::DEFAULT_COLLATION_OID;
            (*fcinfo).nargs = N as i16;
            let places = (*fcinfo).args.as_mut_ptr();
            for (i, argument) in arguments.into_iter().enumerate() {
                let datum = argument.map(|value| value.0);
                places.add(i).write(pg_sys::NullableDatum {
                    value: datum.unwrap_or(pg_sys::Datum::null()),
                    isnull: datum.is_none(),
                });
            }
            let strict_null = (*flinfo).fn_strict && arguments.iter().any(Option::is_none);
            let address = (*flinfo).fn_addr.filter(|_| !strict_null)?;
            let value = trap(|_| address(fcinfo));
            // What it wrote is visible to what follows.
            pg_sys::CommandCounterIncrement();
            (!(*fcinfo).isnull).then_some(value)
        }
    }
}

/// Has `check` look at the function's row in `pg_proc`; it returns what is wrong.
fn with_definition(
    function: pg_sys::Oid,
    role: Role,
    check: impl FnOnce(&pg_sys::FormData_pg_proc) -> Result<(), &'static str>,
) -> Result<(), Error> {
    // SAFETY: the cached tuple is valid until it is released; `check` only reads it.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(
            pg_sys::SysCacheIdentifier::PROCOID as i32,
            pg_sys::Datum::from(function),
        );
        if tuple.is_null() {
            return Err(Error::NoFunction { role });
        }
        let problem = check(&*pg_sys::GETSTRUCT(tuple).cast());
        pg_sys::ReleaseSysCache(tuple);
        problem.map_err(|problem| Error::WrongFunction { role, problem })
    }
}

/// 42501 unless the current user may execute the function.
fn check_execute(function: pg_sys::Oid) {
    // SAFETY: the function exists; a refusal is raised as an error.
    unsafe {
        let user = pg_sys::GetUserId();
        let mode = pg_sys::ACL_EXECUTE as pg_sys::AclMode;
        #[cfg(feature = "pg15")]
        let result = pg_sys::pg_proc_aclcheck(function, user, mode);
        #[cfg(not(feature = "pg15"))]
        let result = pg_sys::object_aclcheck(pg_sys::ProcedureRelationId, function, user, mode);
        if result != pg_sys::AclResult::ACLCHECK_OK {
            let name = pg_sys::get_func_name(function);
            pg_sys::aclcheck_error(result, pg_sys::ObjectType::OBJECT_FUNCTION, name);
        }
        if let Some(hook) = pg_sys::object_access_hook {
            trap(|_| {
                hook(
                    pg_sys::ObjectAccessType::OAT_FUNCTION_EXECUTE,
                    pg_sys::ProcedureRelationId,
                    function,
                    0,
                    null_mut(),
                )
            });
        }
    }
}
