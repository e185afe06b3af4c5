//! Signed file URLs. A signature identifies the sandbox whose token was used to make it. The sandbox's agent decides
//! whether the signature is still valid, and for which file and operation.

use std::{borrow::Cow, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use model::SandboxId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::note::Note;

/// The parts of a URL that its signature covers, and the signature.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Signed<'a> {
    path: Cow<'a, str>,
    operation: &'static str,
    user: Cow<'a, str>,
    expiration: Option<Cow<'a, str>>,
    signature: Cow<'a, str>,
}

impl<'a> Signed<'a> {
    /// Parses the query of the URL; `None` if it has no signature.
    pub(super) fn parse(query: &'a str, operation: &'static str) -> Option<Self> {
        let (mut path, mut user, mut expiration, mut signature) = (None, None, None, None);
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match key.as_ref() {
                "path" => path = Some(value),
                "username" => user = Some(value),
                "signature_expiration" => expiration = Some(value),
                "signature" => signature = Some(value),
                _ => {}
            }
        }
        Some(Self {
            path: path.unwrap_or_default(),
            operation,
            user: user.unwrap_or_default(),
            expiration,
            signature: signature?,
        })
    }

    /// `v1_` followed by the unpadded base64 of the SHA-256 of `path:operation:user:token[:expiration]`.
    fn expected(&self, token: &str) -> String {
        let mut hash = Sha256::new();
        for part in [&self.path, ":", self.operation, ":", &self.user, ":", token] {
            hash.update(part);
        }
        if let Some(expiration) = &self.expiration {
            hash.update(":");
            hash.update(expiration.as_bytes());
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()))
    }

    /// The sandbox whose token was used to sign the URL. Every sandbox is compared, so that the time does not show
    /// which one matches.
    pub(super) fn find(&self, notes: &[(SandboxId, Arc<Note>)]) -> Option<SandboxId> {
        let mut found = None;
        for (id, note) in notes {
            let Some(token) = &note.envd_token else {
                continue;
            };
            let expected = self.expected(token);
            if bool::from(expected.as_bytes().ct_eq(self.signature.as_bytes())) {
                found = Some(id.clone());
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes() -> [(SandboxId, Arc<Note>); 3] {
        let with = |n, token: Option<&str>| {
            let mut note = crate::registry::note::tests::note(0);
            note.envd_token = token.map(str::to_owned);
            (SandboxId::from_random([n; 19]), Arc::new(note))
        };
        [with(1, Some("one")), with(2, Some("two")), with(3, None)]
    }

    const QUERY: &str = "path=%2Fhome%2Fuser%2Fa+b.txt&username=root&signature_expiration=1700000000\
                         &signature=v1_SIGNATURE";

    #[test]
    fn a_signature_names_the_sandbox_of_its_token() {
        let hash = Sha256::digest("/home/user/a b.txt:read:root:two:1700000000");
        let query = QUERY.replace(
            "SIGNATURE",
            &STANDARD_NO_PAD.encode(hash).replace('+', "%2B"),
        );
        let found = Signed::parse(&query, "read").unwrap().find(&notes());
        assert_eq!(found, Some(SandboxId::from_random([2; 19])));
        let other = Signed::parse(&query, "write").unwrap().find(&notes());
        assert_eq!(other, None);
    }

    #[test]
    fn an_unsigned_url_names_no_sandbox() {
        assert_eq!(Signed::parse("path=%2Fa", "read"), None);
        assert_eq!(
            Signed::parse("signature=", "read").unwrap().find(&notes()),
            None
        );
    }
}
