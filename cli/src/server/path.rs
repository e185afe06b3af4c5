//! Parts of request paths.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Unreserved characters stay (RFC 3986, 2.3).
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Text as one segment of a path, or as a value of a query.
pub(crate) fn segment(text: &str) -> String {
    utf8_percent_encode(text, ESCAPED).to_string()
}
