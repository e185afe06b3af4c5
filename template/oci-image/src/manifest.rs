//! Manifests and indexes, in the formats of OCI and of Docker (schema 2).

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Limit for the size of a manifest or index, in bytes. The distribution specification recommends it.
pub const MAX_MANIFEST: u64 = 4 << 20;

const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Types that this crate reads, for the `Accept` header.
pub(crate) const ACCEPTED: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

/// A reference to a blob or manifest by content.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    /// Bytes.
    pub size: u64,
}

/// A registry's response for a reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Document {
    Manifest(Manifest),
    /// The manifest for linux/amd64 in an index.
    Index(Descriptor),
}

/// The parts of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub config: Descriptor,
    /// Lowest layer first.
    pub layers: Vec<(Descriptor, Compression)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("manifest is not valid")]
    Json(#[source] serde_json::Error),
    #[error("manifest is of type {0:?}: only images of OCI and of Docker's schema 2 are supported")]
    Type(String),
    #[error("manifest was sent as {sent:?}, but its mediaType is {own:?}")]
    Confused { sent: String, own: String },
    #[error("image has no variant for linux/amd64; it has {0:?}")]
    Platform(Vec<String>),
    #[error("layer is of type {0:?}, which is not a file system layer")]
    Layer(String),
    #[error("image has {found} layers: the limit is {limit}")]
    Layers { found: usize, limit: usize },
    #[error("layers of the image have {found} bytes: the limit is {limit}")]
    Size { found: u64, limit: u64 },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    media_type: String,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Variant>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Variant {
    #[serde(default)]
    media_type: String,
    digest: Digest,
    size: u64,
    platform: Option<Platform>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Platform {
    os: String,
    architecture: String,
}

impl Document {
    /// Parses a manifest that a registry sent with the media type `sent`.
    ///
    /// # Errors
    /// Returns an error if the document is malformed or of an unsupported type, or if an index has no linux/amd64.
    pub fn parse(bytes: &[u8], sent: &str) -> Result<Self, ManifestError> {
        let raw: Raw = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        let sent = sent.split(';').next().unwrap_or_default().trim();
        let is_generic = matches!(sent, "" | "application/json" | "application/octet-stream");
        if !is_generic && !raw.media_type.is_empty() && raw.media_type != sent {
            return Err(ManifestError::Confused {
                sent: sent.to_owned(),
                own: raw.media_type,
            });
        }
        let kind = if is_generic { &raw.media_type } else { sent };
        let unsupported = || ManifestError::Type(kind.to_owned());
        match kind {
            OCI_INDEX | DOCKER_LIST => {
                let variants = raw.manifests.ok_or_else(unsupported)?;
                select(variants).map(Self::Index)
            }
            OCI_MANIFEST | DOCKER_MANIFEST => {
                let config = raw.config.ok_or_else(unsupported)?;
                let layers = raw.layers.ok_or_else(unsupported)?;
                let layers = layers.into_iter().map(with_compression);
                let layers = layers.collect::<Result<_, _>>()?;
                Ok(Self::Manifest(Manifest { config, layers }))
            }
            _ => Err(unsupported()),
        }
    }
}

/// The first variant for linux/amd64.
fn select(variants: Vec<Variant>) -> Result<Descriptor, ManifestError> {
    let mut others = Vec::new();
    for variant in variants {
        let platform = variant.platform.unwrap_or_default();
        if (platform.os.as_str(), platform.architecture.as_str()) == ("linux", "amd64") {
            return Ok(Descriptor {
                media_type: variant.media_type,
                digest: variant.digest,
                size: variant.size,
            });
        }
        if others.len() < 16 {
            others.push(format!("{}/{}", platform.os, platform.architecture));
        }
    }
    Err(ManifestError::Platform(others))
}

fn with_compression(layer: Descriptor) -> Result<(Descriptor, Compression), ManifestError> {
    let kind = layer.media_type.as_str();
    let oci = kind.strip_prefix("application/vnd.oci.image.layer.");
    let oci = oci.map(|rest| rest.strip_prefix("nondistributable.").unwrap_or(rest));
    let docker = kind.strip_prefix("application/vnd.docker.image.rootfs.");
    let compression = match (oci, docker) {
        (Some("v1.tar"), _) | (_, Some("diff.tar")) => Compression::None,
        (Some("v1.tar+gzip"), _) | (_, Some("diff.tar.gzip" | "foreign.diff.tar.gzip")) => {
            Compression::Gzip
        }
        (Some("v1.tar+zstd"), _) | (_, Some("diff.tar.zstd")) => Compression::Zstd,
        _ => return Err(ManifestError::Layer(layer.media_type)),
    };
    Ok((layer, compression))
}

impl Manifest {
    /// # Errors
    /// Returns an error if the image has too many layers or its layers are too large.
    pub fn check(&self, limits: &crate::Limits) -> Result<(), ManifestError> {
        let (found, limit) = (self.layers.len(), limits.layers);
        if found > limit {
            return Err(ManifestError::Layers { found, limit });
        }
        let sizes = self.layers.iter().map(|(layer, _)| layer.size);
        let found = sizes.fold(0, u64::saturating_add);
        let limit = limits.compressed;
        if found > limit {
            return Err(ManifestError::Size { found, limit });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(kind: &str) -> String {
        let digest = Digest::of(b"");
        format!(r#"{{"mediaType":"{kind}","digest":"{digest}","size":7}}"#)
    }

    #[test]
    fn manifests_without_a_media_type_are_what_the_registry_says() {
        let layer = descriptor("application/vnd.oci.image.layer.v1.tar+zstd");
        let text = format!(r#"{{"config":{layer},"layers":[{layer}]}}"#);
        let sent = format!("{OCI_MANIFEST}; charset=utf-8");
        let Ok(Document::Manifest(manifest)) = Document::parse(text.as_bytes(), &sent) else {
            panic!("not a manifest");
        };
        assert_eq!(manifest.layers[0].1, Compression::Zstd);
        assert!(Document::parse(text.as_bytes(), "application/json").is_err());
        assert!(Document::parse(text.as_bytes(), OCI_INDEX).is_err());
        let confused = format!(r#"{{"mediaType":"{OCI_INDEX}","config":{layer},"layers":[]}}"#);
        let error = Document::parse(confused.as_bytes(), OCI_MANIFEST).unwrap_err();
        assert!(matches!(error, ManifestError::Confused { .. }), "{error}");
    }

    #[test]
    fn an_index_yields_linux_amd64_or_names_what_it_has() {
        let variant = |os, arch| {
            let rest = descriptor(OCI_MANIFEST);
            let rest = rest.trim_start_matches('{');
            format!(r#"{{"platform":{{"os":"{os}","architecture":"{arch}"}},{rest}"#)
        };
        let (arm, amd) = (variant("linux", "arm64"), variant("linux", "amd64"));
        let index = |variants: &str| format!(r#"{{"manifests":[{variants}]}}"#);
        let found = Document::parse(index(&format!("{arm},{amd}")).as_bytes(), DOCKER_LIST);
        assert!(matches!(found, Ok(Document::Index(d)) if d.size == 7));
        let error = Document::parse(index(&arm).as_bytes(), OCI_INDEX).unwrap_err();
        assert!(error.to_string().contains("linux/arm64"), "{error}");
    }

    #[test]
    fn artifacts_and_old_manifests_are_refused() {
        let wasm = descriptor("application/vnd.wasm.content.layer.v1+wasm");
        let text = format!(r#"{{"config":{wasm},"layers":[{wasm}]}}"#);
        let error = Document::parse(text.as_bytes(), OCI_MANIFEST).unwrap_err();
        assert!(matches!(error, ManifestError::Layer(_)), "{error}");
        let old = "application/vnd.docker.distribution.manifest.v1+prettyjws";
        let error = Document::parse(b"{}", old).unwrap_err();
        assert!(matches!(error, ManifestError::Type(_)), "{error}");
    }
}
