//! Sandbox ids that encode their home node.
//!
//! An id is `i` and 19 letters: 14 random ones, then a tag of 5. The tag contains the home's slot number and a check,
//! both masked by an HMAC of the random letters. A client without the cluster's key cannot construct an id that leads
//! to a node of its choice. A guess leads to any node with a probability of slots in use / 60 million. 14 letters are
//! 72 bits.
//!
//! An id that was created without a cluster decodes as one without a home or, with the probability above, with a wrong
//! home. A node therefore looks for a sandbox among its own before it decodes the tag.

use model::SandboxId;
use ring::hmac;
use serde::{Deserialize, Serialize};

/// The key of a cluster's tags, which is the same on every node.
#[derive(Clone)]
pub struct HomeKey(hmac::Key);

impl std::fmt::Debug for HomeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HomeKey")
    }
}

/// The number of a node in tags. Reused only after its node has been removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u16", try_from = "u16")]
pub struct HomeSlot(u16);

const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
const RANDOM: usize = 14;
const TAG: usize = 5;

impl HomeSlot {
    /// Two letters.
    pub const COUNT: u16 = 36 * 36;

    #[must_use]
    pub fn new(number: u16) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    #[must_use]
    pub fn number(self) -> u16 {
        self.0
    }
}

impl From<HomeSlot> for u16 {
    fn from(slot: HomeSlot) -> Self {
        slot.0
    }
}

impl TryFrom<u16> for HomeSlot {
    type Error = String;

    fn try_from(number: u16) -> Result<Self, String> {
        Self::new(number).ok_or_else(|| format!("slot {number} of {}", Self::COUNT))
    }
}

impl HomeKey {
    #[must_use]
    pub fn new(secret: &[u8; 32]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// Creates an id whose home is `slot`, from 14 random bytes (the first ones of a pool's 19).
    #[must_use]
    pub fn id(&self, slot: HomeSlot, random: [u8; RANDOM]) -> SandboxId {
        let mut letters = [0_u8; RANDOM + TAG];
        for (letter, byte) in letters.iter_mut().zip(random) {
            *letter = byte % 36;
        }
        let tag = self.tag(&letters[..RANDOM], slot);
        letters[RANDOM..].copy_from_slice(&tag);
        SandboxId::from_random(letters)
    }

    /// The home of `id`, or `None` if no node of this cluster created it.
    #[must_use]
    pub fn home(&self, id: &SandboxId) -> Option<HomeSlot> {
        let letters: Vec<u8> = id.as_str().bytes().skip(1).map(number).collect();
        let (random, tag) = letters.split_at_checked(RANDOM)?;
        let mask = self.mask(random);
        let high = (u16::from(*tag.first()?) + 36 - mask[0]) % 36;
        let low = (u16::from(*tag.get(1)?) + 36 - mask[1]) % 36;
        let slot = HomeSlot::new(high * 36 + low)?;
        (self.tag(random, slot) == tag).then_some(slot)
    }

    fn tag(&self, random: &[u8], slot: HomeSlot) -> [u8; TAG] {
        let mask = self.mask(random);
        let mut bound = hmac::Context::with_key(&self.0);
        bound.update(b"check");
        bound.update(&slot.0.to_le_bytes());
        bound.update(random);
        let check = bound.sign();
        let masked = |digit: u16, mask: u16| letter((digit + mask) % 36);
        let check = |at: usize| letter(u16::from(check.as_ref()[at]) % 36);
        [
            masked(slot.0 / 36, mask[0]),
            masked(slot.0 % 36, mask[1]),
            check(0),
            check(1),
            check(2),
        ]
    }

    fn mask(&self, random: &[u8]) -> [u16; 2] {
        let mut mask = hmac::Context::with_key(&self.0);
        mask.update(b"mask");
        mask.update(random);
        let mask = mask.sign();
        [0, 1].map(|at| u16::from(mask.as_ref()[at]) % 36)
    }
}

/// A number below 36 in the width of a letter.
fn letter(number: u16) -> u8 {
    u8::try_from(number).unwrap_or_default()
}

fn number(letter: u8) -> u8 {
    let at = LETTERS.iter().position(|known| *known == letter);
    at.and_then(|at| u8::try_from(at).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_id_leads_to_its_home_and_only_with_the_key(
            secret: [u8; 32], random: [u8; 14], slot in 0..HomeSlot::COUNT, at in 1..20_usize, by in 1..36_u8
        ) {
            let slot = HomeSlot::new(slot).unwrap();
            let id = HomeKey::new(&secret).id(slot, random);
            prop_assert_eq!(HomeKey::new(&secret).home(&id), Some(slot));
            // With one letter changed, there may by chance (1 in 46 656) be another home, but never the same one.
            let mut other = id.as_str().as_bytes().to_vec();
            other[at] = LETTERS[usize::from((number(other[at]) + by) % 36)];
            let other: SandboxId = String::from_utf8(other).unwrap().parse().unwrap();
            if at > RANDOM {
                prop_assert_ne!(HomeKey::new(&secret).home(&other), Some(slot));
            }
        }
    }

    #[test]
    fn guessed_ids_rarely_have_a_home() {
        let key = HomeKey::new(&[7; 32]);
        let guesses = (0..20_000_u64).map(|n| {
            let mut bytes = [0; 19];
            let hash = ring::digest::digest(&ring::digest::SHA256, &n.to_le_bytes());
            bytes.copy_from_slice(&hash.as_ref()[..19]);
            SandboxId::from_random(bytes)
        });
        let found = guesses.filter(|id| key.home(id).is_some()).count();
        assert!(found <= 4, "{found} of 20000 guesses, 0.4 expected");
    }
}
