//! Differences between proto3 JSON and serde's defaults: bytes as base64, `null` for the default value, numbers as
//! strings.

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The standard alphabet. As proto3 JSON requires, output is padded, and padding is optional in input.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A bytes field, base64-encoded in JSON.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Blob(pub Vec<u8>);

impl Blob {
    /// Appends `bytes` in base64 to `out`, without an intermediate buffer.
    pub fn encode_into(bytes: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        let len = base64::encoded_len(bytes.len(), true).unwrap_or_default();
        out.resize(start + len, 0);
        let written = BASE64.encode_slice(bytes, out.get_mut(start..).unwrap_or_default());
        debug_assert_eq!(written.ok(), Some(len));
    }

    /// Decodes base64. `None`: the text is not base64.
    #[must_use]
    pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
        BASE64.decode(text).ok()
    }
}

impl std::fmt::Debug for Blob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Blob({:?})", String::from_utf8_lossy(&self.0))
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Blob;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("base64")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Blob, E> {
                let bytes = Blob::decode(text.as_bytes());
                bytes.map(Blob).ok_or_else(|| E::custom("not base64"))
            }
            fn visit_unit<E: de::Error>(self) -> Result<Blob, E> {
                Ok(Blob::default())
            }
        }
        deserializer.deserialize_any(Text)
    }
}

/// Deserializes `null` as the default value.
pub(super) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// Deserializes a `uint32` from a number or from its decimal text.
pub(super) fn opt_u32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    struct Number;
    impl de::Visitor<'_> for Number {
        type Value = Option<u32>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an unsigned 32-bit number")
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<Option<u32>, E> {
            let number = u32::try_from(number);
            number.map(Some).map_err(|_| E::custom("exceeds 32 bits"))
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<u32>, E> {
            let number = text.parse();
            number.map(Some).map_err(|_| E::custom("not a number"))
        }
        fn visit_unit<E: de::Error>(self) -> Result<Option<u32>, E> {
            Ok(None)
        }
    }
    deserializer.deserialize_any(Number)
}

/// An `int64`. Written as decimal text, because many JSON parsers lose digits of large numbers; read from text or a
/// number.
pub(super) mod int64 {
    use serde::{Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(number: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(number)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
        struct Number;
        impl de::Visitor<'_> for Number {
            type Value = i64;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a 64-bit number")
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<i64, E> {
                Ok(number)
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<i64, E> {
                i64::try_from(number).map_err(|_| E::custom("exceeds 63 bits"))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<i64, E> {
                text.parse().map_err(|_| E::custom("not a number"))
            }
            fn visit_unit<E: de::Error>(self) -> Result<i64, E> {
                Ok(0)
            }
        }
        deserializer.deserialize_any(Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_round_trip(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let text = serde_json::to_string(&Blob(bytes.clone())).unwrap();
            let mut direct = vec![b'"'];
            Blob::encode_into(&bytes, &mut direct);
            direct.push(b'"');
            prop_assert_eq!(text.as_bytes(), direct.as_slice());
            let back: Blob = serde_json::from_str(text.trim_end_matches('=')).or_else(|_| serde_json::from_str(&text)).unwrap();
            prop_assert_eq!(back.0, bytes);
        }
    }

    #[test]
    fn padding_is_optional() {
        assert_eq!(Blob::decode(b"YQ"), Some(b"a".to_vec()));
        assert_eq!(Blob::decode(b"YQ=="), Some(b"a".to_vec()));
        assert_eq!(Blob::decode(b"Y!=="), None);
    }
}
