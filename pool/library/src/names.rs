//! Ids and names of templates.

use sha2::{Digest, Sha256};

use crate::error::LibraryError;

/// Id and previous names of each template whose names have changed.
pub type TakenNames = Vec<(String, Vec<String>)>;

const DEFAULT_TAG: &str = ":default";
const MAX_NAME: usize = 128;

/// Strips the default tag from a name.
pub(crate) fn plain(name: &str) -> &str {
    name.strip_suffix(DEFAULT_TAG).unwrap_or(name)
}

pub(crate) fn check_name(name: &str) -> Result<(), LibraryError> {
    let is_word = |word: &str| {
        let mut bytes = word.bytes();
        bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
            && bytes.all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b))
    };
    let mut words = name.split(':');
    let good = name.len() <= MAX_NAME
        && words.next().is_some_and(is_word)
        && words.next().is_none_or(is_word)
        && words.next().is_none();
    if good {
        Ok(())
    } else {
        Err(LibraryError::BadName(format!(
            "{:?} is not a template name: use letters, digits and ._-/ with at most one :tag, {MAX_NAME} bytes in all",
            name.chars().take(MAX_NAME).collect::<String>()
        )))
    }
}

/// The id of an installed template. It is the same in every server process.
pub(crate) fn id_of_name(name: &str) -> String {
    id_of_bytes(&Sha256::digest(format!("installed template {name}")))
}

/// 20 lower-case letters and digits.
pub(crate) fn id_of_bytes(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    bytes
        .iter()
        .take(20)
        .map(|b| char::from(ALPHABET[usize::from(*b) % ALPHABET.len()]))
        .collect()
}
