//! How long the texts that name things may be, and how large numbers.

use crate::error::Error;

/// The most bytes a key, scope, owner or holder may have, in the database's encoding.
pub const LONGEST_NAME: usize = 1024;

/// A key: 1 to 1,024 bytes. Else 22023; NULL (`None`) is 22004.
pub fn name<'a>(argument: &'static str, given: Option<&'a [u8]>) -> Result<&'a [u8], Error> {
    let bytes = given.ok_or(Error::Null { argument })?;
    if bytes.is_empty() {
        return Err(Error::Empty { argument });
    }
    label(argument, bytes)
}

/// A scope: at most 1,024 bytes, and may be empty. Else 22023.
pub fn label<'a>(argument: &'static str, bytes: &'a [u8]) -> Result<&'a [u8], Error> {
    if bytes.len() > LONGEST_NAME {
        return Err(Error::TooLong { argument, bytes: bytes.len() });
    }
    Ok(bytes)
}

/// A number of rows: above 0. Else 22023; NULL (`None`) is 22004.
pub fn rows(argument: &'static str, given: Option<i32>) -> Result<u64, Error> {
    let given = given.ok_or(Error::Null { argument })?;
    u64::try_from(given)
        .ok()
        .filter(|rows| *rows > 0)
        .ok_or(Error::Count { argument, range: "greater than 0" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_1_to_1024_bytes() {
        assert_eq!(name("key", None).unwrap_err().sqlstate(), "22004");
        assert_eq!(name("key", Some(b"")).unwrap_err().sqlstate(), "22023");
        assert!(name("key", Some(&[b'k'; 1])).is_ok());
        assert!(name("key", Some(&[b'k'; 1024])).is_ok());
        assert_eq!(name("key", Some(&[b'k'; 1025])).unwrap_err().sqlstate(), "22023");
    }

    #[test]
    fn a_number_of_rows_is_above_0() {
        assert_eq!(rows("max_rows", None).unwrap_err().sqlstate(), "22004");
        assert_eq!(rows("max_rows", Some(0)).unwrap_err().sqlstate(), "22023");
        assert_eq!(rows("max_rows", Some(i32::MIN)).unwrap_err().sqlstate(), "22023");
        assert_eq!(rows("max_rows", Some(1)), Ok(1));
    }

    #[test]
    fn a_scope_may_be_empty() {
        assert!(label("scope", b"").is_ok());
        assert!(label("scope", &[b's'; 1024]).is_ok());
        assert_eq!(label("scope", &[b's'; 1025]).unwrap_err().sqlstate(), "22023");
    }
}
