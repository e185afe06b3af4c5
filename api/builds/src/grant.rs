//! Authorization of upload URLs. The official clients upload files without their key, so the URL itself must prove that
//! this server allowed the upload. It carries an HMAC-SHA-256 over template, hash, expiry and size.

use std::collections::HashMap;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::hmac;

use super::request::check_hash;

/// Longest query of an upload URL in bytes.
const MAX_QUERY: usize = 512;

/// Permission to upload the files of one hash for one template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub template_id: String,
    /// 64 lower-case hex digits.
    pub hash: String,
    /// Seconds since 1970.
    pub expires_unix_s: u64,
    /// Maximum size of the archive.
    pub max_bytes: u64,
}

/// Why a URL is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    #[error("this is not an upload URL of this server: request a new one")]
    Forged,
    #[error("this upload URL has expired: request a new one")]
    Expired,
}

/// Signs and verifies grants. The key belongs to this server. If it is lost, existing URLs become invalid.
#[derive(Debug)]
pub struct Authority(hmac::Key);

impl Authority {
    #[must_use]
    pub fn new(key: &[u8; 32]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, key))
    }

    /// The query of the URL that carries the grant. The URL's path contains template and hash.
    #[must_use]
    pub fn query(&self, grant: &Grant) -> String {
        let code = hmac::sign(&self.0, grant.message().as_bytes());
        let code = URL_SAFE_NO_PAD.encode(code);
        let Grant {
            expires_unix_s,
            max_bytes,
            ..
        } = grant;
        format!("expires={expires_unix_s}&size={max_bytes}&code={code}")
    }

    /// Verifies the grant of a URL. The code is compared in constant time, and checked before the expiry.
    ///
    /// # Errors
    /// Returns [`GrantError`].
    pub fn verify(
        &self,
        template_id: &str,
        hash: &str,
        query: &str,
        now_unix_s: u64,
    ) -> Result<Grant, GrantError> {
        let (grant, code) = parse(template_id, hash, query).ok_or(GrantError::Forged)?;
        hmac::verify(&self.0, grant.message().as_bytes(), &code).map_err(|_| GrantError::Forged)?;
        if now_unix_s >= grant.expires_unix_s {
            return Err(GrantError::Expired);
        }
        Ok(grant)
    }
}

impl Grant {
    /// The signed text. Each field is preceded by its length, so that no two grants have the same text.
    fn message(&self) -> String {
        let Self {
            template_id,
            hash,
            expires_unix_s,
            max_bytes,
        } = self;
        let (id_length, hash_length) = (template_id.len(), hash.len());
        format!(
            "upload 1 {id_length}:{template_id} {hash_length}:{hash} {expires_unix_s} {max_bytes}"
        )
    }
}

fn parse(template_id: &str, hash: &str, query: &str) -> Option<(Grant, Vec<u8>)> {
    if query.len() > MAX_QUERY {
        return None;
    }
    let mut fields = HashMap::new();
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        // A repeated key could mean one thing here and another to a log reader.
        if fields.insert(key, value).is_some() {
            return None;
        }
    }
    let grant = Grant {
        template_id: template_id.to_owned(),
        hash: check_hash(hash.to_owned()).ok()?,
        expires_unix_s: fields.get("expires")?.parse().ok()?,
        max_bytes: fields.get("size")?.parse().ok()?,
    };
    let code = URL_SAFE_NO_PAD.decode(fields.get("code")?.as_bytes());
    Some((grant, code.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: u64 = 1_800_000_000;

    fn grant() -> Grant {
        Grant {
            template_id: "abc".to_owned(),
            hash: "0a".repeat(32),
            expires_unix_s: NOW + 60,
            max_bytes: 1 << 30,
        }
    }

    fn authority() -> Authority {
        Authority::new(&[7; 32])
    }

    #[test]
    fn a_url_permits_what_was_granted_until_its_end() {
        let (grant, query) = (grant(), authority().query(&grant()));
        let at = |now| authority().verify("abc", &grant.hash, &query, now);
        assert_eq!(at(NOW + 59).as_ref(), Ok(&grant));
        assert_eq!(at(NOW + 60), Err(GrantError::Expired));
        assert_eq!(at(u64::MAX), Err(GrantError::Expired));
    }

    #[test]
    fn a_changed_url_permits_nothing() {
        let hash = grant().hash;
        let query = authority().query(&grant());
        let forged = |id: &str, hash: &str, query: &str| {
            let found = authority().verify(id, hash, query, NOW);
            assert_eq!(found, Err(GrantError::Forged), "{id} {hash} {query}");
        };
        forged("abd", &hash, &query);
        forged("abc", &"0b".repeat(32), &query);
        forged("abc", "../../etc/passwd", &query);
        forged("abc", &hash, &query.replace("size=1", "size=2"));
        forged("abc", &hash, &query.replace("expires=18", "expires=19"));
        forged("abc", &hash, &query.replace("code=", "code=A"));
        forged("abc", &hash, &format!("{query}&size=1"));
        forged("abc", &hash, "expires=1&size=1&code=");
        forged("abc", &hash, "");
        let other = Authority::new(&[8; 32]).verify("abc", &hash, &query, NOW);
        assert_eq!(other, Err(GrantError::Forged));
    }

    #[test]
    fn no_two_grants_have_the_same_text() {
        let of = |template_id: &str, hash: &str| {
            let (template_id, hash) = (template_id.to_owned(), hash.to_owned());
            let grant = Grant {
                template_id,
                hash,
                ..grant()
            };
            grant.message()
        };
        assert_ne!(of("a b", "c"), of("a", "b c"));
    }

    proptest! {
        #[test]
        fn no_query_panics_or_permits_anything(fields in "expires=[0-9]{1,18}&size=[0-9]{1,18}", code in prop::collection::vec(any::<u8>(), 0..40), junk in "[&=%a-z+]{0,6}") {
            let query = format!("{fields}&code={}{junk}", URL_SAFE_NO_PAD.encode(code));
            prop_assert!(authority().verify("abc", &grant().hash, &query, 0).is_err());
        }
    }
}
