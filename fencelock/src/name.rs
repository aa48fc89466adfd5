//! What is locked: a checked name.

use crate::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// The name of a lock: UTF-8, 1 to [`Name::MAX`] bytes, any characters.
///
/// Cheap to clone. Every engine encodes it safely and without collisions.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// The longest name, in bytes.
    pub const MAX: usize = 512;

    /// Checks and keeps a name.
    ///
    /// # Errors
    /// `Invalid` when it is empty or longer than [`Name::MAX`] bytes.
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        check(name.as_ref())?;
        Ok(Self(name.as_ref().into()))
    }

    /// The same for a text that is shared already.
    pub(crate) fn shared(name: &Arc<str>) -> Result<Self> {
        check(name)?;
        Ok(Self(Arc::clone(name)))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn check(name: &str) -> Result<()> {
    match name.len() {
        0 => Err(Error::invalid("the lock's name is empty; give it 1 to 512 bytes")),
        1..=Name::MAX => Ok(()),
        length => {
            let start: String = name.chars().take(24).collect();
            Err(Error::invalid(format!(
                "the lock's name {start:?}… is {length} bytes long; shorten it to 512 (or use a hash of it)"
            )))
        }
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_name_has_1_to_512_bytes() {
        assert_eq!(Name::new("").unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(Name::new("x".repeat(512)).unwrap().as_str().len(), 512);
        let long = Name::new("ü".repeat(257)).unwrap_err();
        assert_eq!(long.kind(), ErrorKind::Invalid);
        assert!(long.to_string().contains("514 bytes"), "{long}");
        assert!(Name::new("\0/..{}\n%").is_ok());
    }
}
