//! Signed file URLs. A signature identifies the sandbox whose token was used to make it. The sandbox's agent checks
//! whether the signature is still valid, and for which file and operation.
//!
//! Anyone can send such a URL, and each is compared with every sandbox. Its parts are therefore limited before anything
//! is hashed, and the part before the token is hashed only once. The cost per sandbox is one hash of its token.

use std::{borrow::Cow, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use model::SandboxId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::note::{Note, now};

/// Maximum length of a path (`PATH_MAX` of Linux), of a user name, and of a number of 64 bits.
const PATH: usize = 4096;
const USER: usize = 256;
const EXPIRATION: usize = 20;
/// Maximum length of a query: all parts, every byte as `%XX`.
const QUERY: usize = 16 << 10;
const VERSION: &str = "v1_";

/// Why a signed URL matches no sandbox. The texts equal the agent's, because clients compare them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    #[error("invalid signature")]
    Invalid,
    #[error("signature is already expired")]
    Expired,
}

/// Checks a signed URL without looking for its sandbox.
///
/// # Errors
/// Returns [`SignatureError`] if no sandbox accepts the URL.
pub(crate) fn check(query: &str) -> Result<(), SignatureError> {
    Signed::parse(query, "read").map(drop)
}

/// The parts of a URL that its signature covers, and the signature.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Signed<'a> {
    path: Cow<'a, str>,
    operation: &'static str,
    user: Cow<'a, str>,
    expiration: Option<Cow<'a, str>>,
    /// A SHA-256.
    signature: Vec<u8>,
}

impl<'a> Signed<'a> {
    /// Parses the query of the URL.
    ///
    /// # Errors
    /// Returns [`SignatureError`] if there is no signature, or if the agent would refuse the URL whatever its token.
    pub(super) fn parse(query: &'a str, operation: &'static str) -> Result<Self, SignatureError> {
        if query.len() > QUERY {
            return Err(SignatureError::Invalid);
        }
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
        let signed = Self {
            path: path.unwrap_or_default(),
            operation,
            user: user.unwrap_or_default(),
            expiration,
            signature: signature
                .and_then(|text| decode(&text))
                .ok_or(SignatureError::Invalid)?,
        };
        signed.check(now() / 1000)?;
        Ok(signed)
    }

    fn check(&self, now_s: u64) -> Result<(), SignatureError> {
        let expiration = self.expiration.as_deref().unwrap_or_default();
        let fits =
            self.path.len() <= PATH && self.user.len() <= USER && expiration.len() <= EXPIRATION;
        if !fits {
            return Err(SignatureError::Invalid);
        }
        let at: Option<i64> = match &self.expiration {
            Some(text) => Some(text.parse().map_err(|_| SignatureError::Invalid)?),
            None => None,
        };
        match at.map(u64::try_from) {
            Some(Ok(at)) if at < now_s => Err(SignatureError::Expired),
            Some(Err(_)) => Err(SignatureError::Expired),
            Some(Ok(_)) | None => Ok(()),
        }
    }

    /// A signature is `v1_` followed by the unpadded base64 of the SHA-256 of `path:operation:user:token[:expiration]`.
    /// This is the hash's state before the token.
    fn start<H: Digest>(&self) -> H {
        let mut hash = H::new();
        for part in [&self.path, ":", self.operation, ":", &self.user, ":"] {
            hash.update(part);
        }
        hash
    }

    /// The sandbox whose token was used to sign the URL. Every sandbox is compared, so that the duration does not
    /// reveal which one matches.
    pub(super) fn find(&self, notes: &[(SandboxId, Arc<Note>)]) -> Option<SandboxId> {
        self.find_with::<Sha256>(notes)
    }

    fn find_with<H: Digest + Clone>(&self, notes: &[(SandboxId, Arc<Note>)]) -> Option<SandboxId> {
        let start = self.start::<H>();
        let mut found = None;
        for (id, note) in notes {
            let Some(token) = &note.envd_token else {
                continue;
            };
            let mut hash = start.clone();
            hash.update(token);
            if let Some(expiration) = &self.expiration {
                hash.update(":");
                hash.update(expiration.as_bytes());
            }
            if bool::from(hash.finalize().as_slice().ct_eq(&self.signature)) {
                found = Some(id.clone());
            }
        }
        found
    }
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let encoded = text.strip_prefix(VERSION)?;
    // 43 characters are 32 bytes.
    let is_one = encoded.len() == 43;
    STANDARD_NO_PAD.decode(encoded).ok().filter(|_| is_one)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sha2::digest::{FixedOutput, HashMarker, Output, OutputSizeUser, Update, consts::U32};

    use super::*;

    fn notes() -> [(SandboxId, Arc<Note>); 3] {
        let with = |n, token: Option<&str>| {
            let mut note = crate::registry::note::tests::note(0);
            note.envd_token = token.map(str::to_owned);
            (SandboxId::from_random([n; 19]), Arc::new(note))
        };
        [with(1, Some("one")), with(2, Some("two")), with(3, None)]
    }

    const QUERY: &str = "path=%2Fhome%2Fuser%2Fa+b.txt&username=root&signature_expiration=33000000000\
                         &signature=SIGNATURE";

    fn signature(text: &str) -> String {
        let hash = STANDARD_NO_PAD.encode(Sha256::digest(text));
        format!("v1_{}", hash.replace('+', "%2B"))
    }

    #[test]
    fn a_signature_names_the_sandbox_of_its_token() {
        let signature = signature("/home/user/a b.txt:read:root:two:33000000000");
        let query = QUERY.replace("SIGNATURE", &signature);
        let found = Signed::parse(&query, "read").unwrap().find(&notes());
        assert_eq!(found, Some(SandboxId::from_random([2; 19])));
        let other = Signed::parse(&query, "write").unwrap().find(&notes());
        assert_eq!(other, None);
    }

    #[test]
    fn a_url_that_no_agent_accepts_is_refused_before_it_is_hashed() {
        let signed = signature("x");
        let with = |more: &str| format!("signature={signed}{more}");
        assert_eq!(check(&with("")), Ok(()));
        assert_eq!(
            check(&with(&format!("&path={}", "%2F".repeat(PATH)))),
            Ok(())
        );
        let expired = Err(SignatureError::Expired);
        for query in ["&signature_expiration=1", "&signature_expiration=-1"] {
            assert_eq!(check(&with(query)), expired, "{query}");
        }
        let long = |name: &str, length: usize| with(&format!("&{name}={}", "1".repeat(length)));
        for query in [
            "path=%2Fa".to_owned(),
            "signature=".to_owned(),
            "signature=v1_".to_owned(),
            format!("signature={signed}A"),
            format!("signature=v2_{}", &signed[3..]),
            format!("signature={}", &signed[..signed.len() - 1]),
            with("&signature_expiration="),
            with("&signature_expiration=1x"),
            long("path", PATH + 1),
            long("username", USER + 1),
            long("signature_expiration", EXPIRATION + 1),
            long("other", super::QUERY),
        ] {
            assert_eq!(check(&query), Err(SignatureError::Invalid), "{query}");
        }
    }

    thread_local! {
        static BYTES: Cell<usize> = const { Cell::new(0) };
    }

    /// A hash that counts the bytes it is given.
    #[derive(Clone, Default)]
    struct Counter(Sha256);

    impl HashMarker for Counter {}

    impl OutputSizeUser for Counter {
        type OutputSize = U32;
    }

    impl Update for Counter {
        fn update(&mut self, data: &[u8]) {
            BYTES.set(BYTES.get() + data.len());
            Digest::update(&mut self.0, data);
        }
    }

    impl FixedOutput for Counter {
        fn finalize_into(self, out: &mut Output<Self>) {
            Digest::finalize_into(self.0, out);
        }
    }

    /// Number of bytes hashed for a URL with a path of this length, on a server with this many sandboxes.
    fn hashed(path: usize, sandboxes: usize) -> usize {
        let query = format!("path={}&signature={}", "a".repeat(path), signature("x"));
        let one = notes()[0].clone();
        let signed = Signed::parse(&query, "read").unwrap();
        BYTES.set(0);
        assert_eq!(signed.find_with::<Counter>(&vec![one; sandboxes]), None);
        BYTES.get()
    }

    #[test]
    fn the_path_of_a_signed_url_is_hashed_once_for_all_sandboxes() {
        let token = "one".len();
        for path in [1, PATH] {
            let start = hashed(path, 0);
            assert!(start < path + 16, "{start}");
            assert_eq!(hashed(path, 500) - start, 500 * token);
        }
    }
}
