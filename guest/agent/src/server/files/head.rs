//! Headers of requests for files.

use super::metadata::Metadata;

/// Headers that matter only for `/files`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileHead {
    pub(super) accept_encoding: String,
    pub(super) range: Option<String>,
    /// `If-Range` was sent. The agent has no validators, so the range never matches and the whole file is sent.
    pub(super) if_range: bool,
    /// Values of the headers `X-Metadata-KEY`, by KEY in lower case.
    pub(super) metadata: Metadata,
}

impl FileHead {
    #[cold]
    #[inline(never)]
    pub(crate) fn take(&mut self, name: &str, value: &str) {
        let name = name.to_ascii_lowercase();
        match name.as_str() {
            "accept-encoding" => value.clone_into(&mut self.accept_encoding),
            "range" => self.range = Some(value.to_owned()),
            "if-range" => self.if_range = true,
            _ => {
                let key = name.strip_prefix("x-metadata-");
                if let Some(key) = key.filter(|key| !key.is_empty()) {
                    // Of several values the first counts, as in envd.
                    let value = value.to_owned();
                    self.metadata.entry(key.to_owned()).or_insert(value);
                }
            }
        }
    }
}
