//! Java's trust stores: files in the format JKS, which every JDK reads, whatever format it writes.
//!
//! ```text
//! u32 magic, u32 version, u32 number of entries
//!   u32 2, text alias, u64 time, text "X.509", u32 length, certificate     text: u16 length, bytes
//! 20 bytes: SHA-1 of the password in UTF-16, "Mighty Aphrodite", and all bytes before
//! ```
//! The password is `changeit`, as in every JDK's store. Sizes and contents come from the guest's disk and are not
//! trusted.

use std::{
    fs,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use sha1::{Digest, Sha1};

/// Paths used by JDKs: Debian, Ubuntu and Alpine; Fedora; openSUSE; the Temurin images.
const STORES: [&str; 4] = [
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
    "/var/lib/ca-certificates/java-cacerts",
    "/opt/java/openjdk/lib/security/cacerts",
];
/// Directory of a distribution's JDKs, and the paths of a store in each: since Java 9, and before.
const JDKS: &str = "/usr/lib/jvm";
const IN_JDK: [&str; 2] = ["lib/security/cacerts", "jre/lib/security/cacerts"];

const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
const CERTIFICATE: u32 = 2;
const DIGEST: usize = 20;
const PASSWORD: &str = "changeit";
/// Prefix of the aliases of authorities from `/init`.
const ALIAS: &str = "cube-egress";
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// Paths of stores that may exist. Several may refer to the same file.
pub(super) fn names() -> Vec<PathBuf> {
    let jdks = fs::read_dir(JDKS).into_iter().flatten().flatten();
    let in_jdks = jdks.flat_map(|jdk| IN_JDK.map(|name| jdk.path().join(name)));
    STORES.iter().map(PathBuf::from).chain(in_jdks).collect()
}

/// The file that is mounted over the store with this number.
pub(super) fn file(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("java-{number}.jks"))
}

/// A store with the certificates of `old` and the authorities in `pem`, without those that an earlier call has
/// added. If `old` has a different format, the system's PEM certificates replace its certificates. `None`: there
/// are none.
pub(super) fn with_authority(old: &[u8], system: &[u8], pem: &str) -> Option<Vec<u8>> {
    let of_system = || Store::of_system(&String::from_utf8_lossy(system));
    let mut store = Store::read(old).or_else(of_system)?;
    store.add(ALIAS, pem);
    Some(store.write())
}

/// Entries in their encoded form.
#[derive(Debug, Default)]
struct Store {
    entries: Vec<Vec<u8>>,
}

impl Store {
    /// The certificates of a file, without authorities from `/init`. `None`: it is not in this format.
    fn read(bytes: &[u8]) -> Option<Self> {
        let mut left = bytes.get(..bytes.len().checked_sub(DIGEST)?)?;
        if take_u32(&mut left)? != MAGIC || take_u32(&mut left)? != VERSION {
            return None;
        }
        let mut store = Self::default();
        for _ in 0..take_u32(&mut left)? {
            let entry = left;
            if take_u32(&mut left)? != CERTIFICATE {
                return None;
            }
            let alias = take_text(&mut left)?;
            take(&mut left, size_of::<u64>())?;
            take_text(&mut left)?;
            let length = take_u32(&mut left)?;
            take(&mut left, usize::try_from(length).ok()?)?;
            if !alias.starts_with(ALIAS.as_bytes()) {
                store
                    .entries
                    .push(entry[..entry.len() - left.len()].to_vec());
            }
        }
        Some(store)
    }

    fn of_system(pem: &str) -> Option<Self> {
        let mut store = Self::default();
        store.add("system", pem);
        (!store.entries.is_empty()).then_some(store)
    }

    /// Adds the certificates of a PEM text. Unreadable ones are skipped.
    fn add(&mut self, alias: &str, pem: &str) {
        let ends = pem.split(BEGIN).skip(1);
        let texts = ends.filter_map(|part| part.split_once(END));
        for (number, (text, _)) in texts.enumerate() {
            let text: String = text.split_ascii_whitespace().collect();
            if let Ok(certificate) = STANDARD.decode(text) {
                let alias = format!("{alias}-{number}");
                self.entries.extend(entry(&alias, &certificate));
            }
        }
    }

    fn write(&self) -> Vec<u8> {
        let count = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        let mut bytes = [MAGIC, VERSION, count].map(u32::to_be_bytes).concat();
        bytes.extend(self.entries.concat());
        let mut digest = Sha1::new();
        for unit in PASSWORD.encode_utf16() {
            digest.update(unit.to_be_bytes());
        }
        digest.update(b"Mighty Aphrodite");
        digest.update(&bytes);
        bytes.extend_from_slice(&digest.finalize());
        bytes
    }
}

/// `None`: the certificate is too long.
fn entry(alias: &str, certificate: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = CERTIFICATE.to_be_bytes().to_vec();
    let put = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend(u16::try_from(text.len()).ok()?.to_be_bytes());
        bytes.extend(text.as_bytes());
        Some(())
    };
    put(&mut bytes, alias)?;
    // Unknown creation time.
    bytes.extend(0_u64.to_be_bytes());
    put(&mut bytes, "X.509")?;
    bytes.extend(u32::try_from(certificate.len()).ok()?.to_be_bytes());
    bytes.extend(certificate);
    Some(bytes)
}

fn take<'a>(left: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = left.split_at_checked(length)?;
    *left = rest;
    Some(taken)
}

fn take_u32(left: &mut &[u8]) -> Option<u32> {
    let bytes = take(left, size_of::<u32>())?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn take_text<'a>(left: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = take(left, size_of::<u16>())?;
    take(
        left,
        usize::from(u16::from_be_bytes(length.try_into().ok()?)),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nAAEC\n-----END CERTIFICATE-----\n";
    const SYSTEM: &str = "# a comment\n-----BEGIN CERTIFICATE-----\nBAUG\n-----END CERTIFICATE-----\n\
                          -----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n";

    fn aliases(bytes: &[u8]) -> Vec<String> {
        let store = Store::read(bytes).unwrap();
        let alias = |entry: &Vec<u8>| {
            let mut left = &entry[4..];
            String::from_utf8(take_text(&mut left).unwrap().to_vec()).unwrap()
        };
        store.entries.iter().map(alias).collect()
    }

    #[test]
    fn an_authority_is_added_replaced_and_removed() {
        let made = with_authority(b"PKCS", SYSTEM.as_bytes(), PEM).unwrap();
        // Authorities from `/init` are not copied.
        assert_eq!(aliases(&made), ["system-0"]);
        assert!(made.windows(13).any(|bytes| bytes == b"cube-egress-0"));
        let plain = with_authority(&made, b"", "").unwrap();
        assert!(!plain.windows(13).any(|bytes| bytes == b"cube-egress-0"));
        assert_eq!(with_authority(&plain, b"", PEM).unwrap(), made);
        assert_eq!(with_authority(&made, b"", PEM).unwrap(), made);
        assert_eq!(with_authority(b"PKCS", b"", PEM), None);
        let empty = Store::default().write();
        let alone = with_authority(&empty, SYSTEM.as_bytes(), PEM).unwrap();
        assert_eq!(with_authority(&alone, b"", ""), Some(empty));
    }

    /// The bytes that keytool of Java 17 writes for the password `changeit` and no entries.
    #[test]
    fn the_digest_is_that_of_java() {
        let digest = &Store::default().write()[12..];
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "e2686e45fb43dfa4d992dd41ceb6b21c6330d792");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(mut bytes: Vec<u8>, is_marked: bool) {
            if is_marked {
                bytes.splice(0..0, [MAGIC, VERSION, 3].map(u32::to_be_bytes).concat());
            }
            if let Some(store) = Store::read(&bytes) {
                prop_assert!(store.entries.concat().len() <= bytes.len());
            }
        }
    }
}
