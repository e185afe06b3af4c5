//! Signed links: access to one file without the access token. Pure.

use envd::Blob;
use sha2::{Digest, Sha256};

use transport::http;

use super::super::secret::is_same_secret;

/// The operation that a link allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
}

impl Operation {
    fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Authorizes a request for a file. `token` is the sandbox's access token and must not be empty. `given` is the token
/// in the request, empty if there is none; if it is wrong, a signature does not help. `now` is in seconds since 1970.
///
/// # Errors
/// Returns the message of a 401, which clients compare.
pub(crate) fn check(
    operation: Operation,
    token: &str,
    given: &str,
    query: &str,
    now: u64,
) -> Result<(), &'static str> {
    if !given.is_empty() {
        return if is_same_secret(token, given) {
            Ok(())
        } else {
            Err("access token present in header but does not match")
        };
    }
    let value = |name| http::query_value(query, name);
    let signature = value("signature").ok_or("missing signature query parameter")?;
    let expiration = match value("signature_expiration") {
        Some(text) => Some(text.parse::<i64>().map_err(|_| "invalid signature")?),
        None => None,
    };
    let (path, user) = (value("path"), value("username"));
    let wanted = sign(
        operation,
        token,
        &path.unwrap_or_default(),
        &user.unwrap_or_default(),
        expiration,
    );
    if !is_same_secret(&wanted, &signature) {
        return Err("invalid signature");
    }
    match expiration {
        Some(at) if u64::try_from(at).is_ok_and(|at| at < now) || at < 0 => {
            Err("signature is already expired")
        }
        _ => Ok(()),
    }
}

/// The signature: `v1_` and the unpadded base64 of SHA-256 over `path:operation:user:token[:expiration]`, with path and
/// user as in the link.
fn sign(
    operation: Operation,
    token: &str,
    path: &str,
    user: &str,
    expiration: Option<i64>,
) -> String {
    let mut text = format!("{path}:{}:{user}:{token}", operation.word());
    if let Some(at) = expiration {
        text.push_str(&format!(":{at}"));
    }
    let mut signature = b"v1_".to_vec();
    Blob::encode_into(&Sha256::digest(text.as_bytes()), &mut signature);
    let signature = String::from_utf8(signature).unwrap_or_default();
    signature.trim_end_matches('=').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python: `base64(sha256(b"/a b:read:user:secret:100").digest())`, without padding.
    const SIGNED: &str = "v1_L3HOFPwjDrABXBT0bJy6gprhy0712gPp2m7JW3KVLbg";
    /// The same for `/a b:write::secret`.
    const FOR_EVER: &str = "v1_z3kqIJvEG/Od0sIkiA+1gNxcPg/geF3+ke2Vx/jsC5c";

    fn form(text: &str) -> String {
        text.replace('+', "%2B").replace('/', "%2F")
    }

    #[test]
    fn a_link_allows_only_what_it_was_signed_for() {
        let link = format!("path=/a+b&username=user&signature={}", form(SIGNED));
        let link = format!("{link}&signature_expiration=100");
        let check = |operation, query: &str, now| check(operation, "secret", "", query, now);
        assert_eq!(check(Operation::Read, &link, 100), Ok(()));
        let expired = Err("signature is already expired");
        assert_eq!(check(Operation::Read, &link, 101), expired);
        let invalid = Err("invalid signature");
        assert_eq!(check(Operation::Write, &link, 100), invalid);
        for (from, to) in [
            ("=100", "=200"),
            ("username=user", "username=root"),
            ("a+b", "a"),
        ] {
            assert_eq!(check(Operation::Read, &link.replace(from, to), 1), invalid);
        }
        assert_eq!(check(Operation::Read, &format!("{link}x"), 1), invalid);
        let link = format!("path=%2Fa%20b&signature={}", form(FOR_EVER));
        assert_eq!(check(Operation::Write, &link, u64::MAX), Ok(()));
        let missing = Err("missing signature query parameter");
        assert_eq!(check(Operation::Write, "path=/a", 1), missing);
    }

    #[test]
    fn a_token_takes_precedence_over_a_signature() {
        let check = |given| check(Operation::Read, "secret", given, "", 1);
        assert_eq!(check("secret"), Ok(()));
        let wrong = Err("access token present in header but does not match");
        assert_eq!(check("other"), wrong);
    }
}
