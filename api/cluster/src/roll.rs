//! Signatures of member records. The authority's key signs each record, and every node verifies it, so that access to
//! etcd alone is not enough to admit a host.

use std::fmt;

use ring::{
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
        UnparsedPublicKey,
    },
};
use serde::{Deserialize, Serialize};

use crate::{EtcdConfig, HomeSlot, Member, NodeId};

/// A host that applies for membership.
#[derive(Clone, Debug)]
pub struct Applicant {
    pub id: NodeId,
    /// See [`Member::identity`].
    pub identity: String,
    /// See [`Member::key`].
    pub key: String,
}

/// An ECDSA signature of a record, in hex.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollSignature(String);

/// Signs member records of one cluster with the authority's key.
pub struct MemberSigner {
    cluster: String,
    key: EcdsaKeyPair,
    random: SystemRandom,
}

impl fmt::Debug for MemberSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemberSigner")
    }
}

/// Verifies member records of one cluster.
#[derive(Clone, Debug)]
pub struct MemberVerifier {
    cluster: String,
    /// An uncompressed point of P-256.
    key: Vec<u8>,
}

/// Admits and removes members. Exists only on the host with the authority's key.
#[derive(Debug)]
pub struct Registrar {
    pub signer: MemberSigner,
    /// Connects as etcd's user `root`, except over plain HTTP.
    pub etcd: EtcdConfig,
}

impl MemberSigner {
    /// The key is PKCS #8 in DER. Returns `None` if it is not a P-256 key.
    #[must_use]
    pub fn new(cluster: &str, pkcs8: &[u8]) -> Option<Self> {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8, &random);
        Some(Self {
            cluster: cluster.to_owned(),
            key: key.ok()?,
            random,
        })
    }

    #[must_use]
    pub fn verifier(&self) -> MemberVerifier {
        MemberVerifier::new(&self.cluster, self.key.public_key().as_ref())
    }

    /// The record of a host in this slot.
    #[must_use]
    pub fn member(&self, applicant: &Applicant, slot: HomeSlot) -> Member {
        let mut member = Member {
            id: applicant.id.clone(),
            identity: applicant.identity.clone(),
            slot,
            key: applicant.key.clone(),
            signature: RollSignature::default(),
        };
        let text = statement(&self.cluster, &member);
        // Without random numbers there is no signature, and every node refuses the record.
        if let Ok(signature) = self.key.sign(&self.random, text.as_bytes()) {
            let digits = signature.as_ref().iter().map(|byte| format!("{byte:02x}"));
            member.signature = RollSignature(digits.collect());
        }
        member
    }
}

impl MemberVerifier {
    /// `key` is the public key in the authority's certificate, an uncompressed P-256 point.
    #[must_use]
    pub fn new(cluster: &str, key: &[u8]) -> Self {
        Self {
            cluster: cluster.to_owned(),
            key: key.to_owned(),
        }
    }

    /// Whether the authority has signed this record.
    #[must_use]
    pub fn is_signed(&self, member: &Member) -> bool {
        let Some(signature) = bytes_of(&member.signature.0) else {
            return false;
        };
        let text = statement(&self.cluster, member);
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.key);
        key.verify(text.as_bytes(), &signature).is_ok()
    }
}

/// The signed text. Certificates, which the same key signs, start with another byte. JSON separates the fields
/// unambiguously.
fn statement(cluster: &str, member: &Member) -> String {
    let Member {
        id,
        identity,
        slot,
        key,
        signature: _,
    } = member;
    let fields = serde_json::json!([cluster, id, identity, slot, key]);
    format!("cube member 1 {fields}")
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let pairs = hex.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.map(byte).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A new authority for the cluster `c`.
    pub(crate) fn signer() -> MemberSigner {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random);
        MemberSigner::new("c", key.unwrap().as_ref()).unwrap()
    }

    pub(crate) fn applicant(name: &str, identity: &str) -> Applicant {
        Applicant {
            id: name.parse().unwrap(),
            identity: identity.to_owned(),
            key: "k".to_owned(),
        }
    }

    #[test]
    fn a_record_counts_only_as_the_authority_has_signed_it() {
        let (ours, other) = (signer(), signer());
        let slot = HomeSlot::new(1).unwrap();
        let member = ours.member(&applicant("b", "x"), slot);
        let verifier = ours.verifier();
        assert!(verifier.is_signed(&member));
        assert!(!other.verifier().is_signed(&member));
        assert!(!MemberVerifier::new("d", &verifier.key).is_signed(&member));
        let changes: [fn(&mut Member); 5] = [
            |member| member.id = "a".parse().unwrap(),
            |member| member.identity = "y".to_owned(),
            |member| member.slot = HomeSlot::new(2).unwrap(),
            |member| member.key = "l".to_owned(),
            |member| member.signature = RollSignature("é".to_owned()),
        ];
        for change in changes {
            let mut changed = member.clone();
            change(&mut changed);
            assert!(!verifier.is_signed(&changed), "{changed:?}");
        }
    }
}
