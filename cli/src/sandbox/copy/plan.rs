//! Parses the arguments of `cube sandbox cp`.

use std::path::PathBuf;

use crate::failure::Failure;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    Here(PathBuf),
    /// Id of the sandbox, and the path in it.
    Sandbox(String, String),
}

impl Place {
    /// `ID:PATH`, where ID has no slash; everything else is a local path, including `./a:b`.
    pub(super) fn parse(text: &str) -> Self {
        match text.split_once(':') {
            Some((id, path)) if !id.is_empty() && !id.contains('/') => {
                Self::Sandbox(id.to_owned(), path.to_owned())
            }
            _ => Self::Here(text.into()),
        }
    }
}

/// A name listed by a sandbox, if it is a single path component.
pub(super) fn component(name: &str) -> Result<&str, Failure> {
    let is_one = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']);
    if is_one {
        return Ok(name);
    }
    let shown = envd::guest_text(name);
    Err(Failure::refused(format!(
        "the sandbox lists a file named {shown:?}, which no file can have"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_sandboxes_have_an_id_and_a_colon() {
        let sandbox = |id: &str, path: &str| Place::Sandbox(id.to_owned(), path.to_owned());
        assert_eq!(Place::parse("i1:/a/b"), sandbox("i1", "/a/b"));
        assert_eq!(Place::parse("i1:a:b"), sandbox("i1", "a:b"));
        assert_eq!(Place::parse("i1:"), sandbox("i1", ""));
        for here in ["a", "./a:b", "/x/a:b", ":a", "."] {
            assert_eq!(Place::parse(here), Place::Here(here.into()));
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        assert_eq!(component("a b").unwrap(), "a b");
        for bad in ["", ".", "..", "a/b", "../x", "/etc", "a\0"] {
            assert!(component(bad).is_err(), "{bad:?}");
        }
    }
}
