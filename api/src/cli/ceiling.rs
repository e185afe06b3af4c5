//! Size limits on the command line.

use std::str::FromStr;

use model::Bytes;

/// A size limit, or `none`. Zero is rejected because its meaning ("no limit" or "nothing allowed") would be ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ceiling(pub(super) Option<Bytes>);

impl FromStr for Ceiling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "none" => Ok(Self(None)),
            Ok(Bytes(0)) => Err("0 is not a valid limit: use none for no limit".to_owned()),
            Ok(size) => Ok(Self(Some(size))),
            Err(why) => Err(format!("{why}; use none for no limit")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_size_or_none() {
        let read = |text: &str| text.parse::<Ceiling>().map(|ceiling| ceiling.0);
        assert_eq!(read("none"), Ok(None));
        assert_eq!(read("64MiB"), Ok(Some(Bytes::mib(64))));
        for wrong in ["0", "0MiB", "", "much", "None"] {
            assert!(read(wrong).unwrap_err().contains("none"), "{wrong}");
        }
    }
}
