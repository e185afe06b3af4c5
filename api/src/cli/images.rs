//! Options of `cube-api serve` for the images that templates are built from.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use api::builds::bases::ImagesSpec;
use clap::Args;
use ipnet::IpNet;
use model::Bytes;
use netisolation::Destinations;
use oci_image::registry::{Endpoint, Registries, docker_config};

use super::network::forbidden;

/// Memory of one conversion, if the server's memory has no limit.
const MEMORY: Bytes = Bytes::mib(4096);

#[derive(Args)]
pub(super) struct ImageOptions {
    /// Disk space of the images that templates are built from; the least recently used ones are removed
    #[arg(long, value_name = "SIZE", default_value = "20GiB")]
    image_quota: Bytes,
    /// Server from which to pull a domain's images; repeat to add servers, tried in order
    #[arg(long, value_name = "DOMAIN=URL")]
    image_mirror: Vec<Mirror>,
    /// Block within the denied ranges, or an address of this host, that image registries may use; repeat for more
    #[arg(long, value_name = "CIDR", value_parser = super::serve::block)]
    image_exception: Vec<IpNet>,
    /// Docker's config.json with credentials for image registries, for builds without their own
    #[arg(long, value_name = "FILE")]
    image_credentials: Option<PathBuf>,
    /// Path of cube-image, which converts images [default: next to this program]
    #[arg(long, value_name = "FILE")]
    image_converter: Option<PathBuf>,
    /// Directory of the static programs for images without a shell [default: ../guest relative to the directory of
    /// templates]
    #[arg(long, value_name = "DIR")]
    image_userland: Option<PathBuf>,
}

/// The value of `--image-mirror`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mirror {
    domain: String,
    endpoint: Endpoint,
}

impl FromStr for Mirror {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not DOMAIN=URL: write it like docker.io=https://mirror.example:5000"
            )
        };
        let (domain, url) = text.split_once('=').ok_or_else(wrong)?;
        if domain.is_empty() || domain.contains('/') {
            return Err(wrong());
        }
        Ok(Self {
            domain: domain.to_owned(),
            endpoint: url.parse().map_err(|_| wrong())?,
        })
    }
}

impl ImageOptions {
    /// `beside` is the directory of this program, `templates` the directory of templates, `memory` the server's memory
    /// limit, and `denied` are the addresses that the operator denies.
    ///
    /// # Errors
    /// Returns a message if the credentials cannot be read.
    pub(super) fn spec(
        self,
        beside: &Path,
        templates: Option<&Path>,
        memory: Option<Bytes>,
        denied: &[Destinations],
    ) -> Result<ImagesSpec, String> {
        let mut registries = Registries {
            forbidden: forbidden(&self.image_exception, denied),
            ..Registries::default()
        };
        for Mirror { domain, endpoint } in self.image_mirror {
            registries
                .endpoints
                .entry(domain)
                .or_default()
                .push(endpoint);
        }
        if let Some(path) = &self.image_credentials {
            let shown = path.display();
            let failed = |why: String| format!("--image-credentials {shown}: {why}");
            let text = std::fs::read_to_string(path).map_err(|why| failed(why.to_string()))?;
            registries.credentials =
                docker_config(&text).map_err(|why| failed(model::chain(&why)))?;
        }
        let usual = templates
            .unwrap_or(&beside.join("../templates"))
            .join("../guest");
        // Half of the server's limit: a conversion counts towards the server's memory.
        let half = memory.map_or(MEMORY, |memory| Bytes(memory.0 / 2));
        Ok(ImagesSpec {
            converter: (self.image_converter).unwrap_or_else(|| beside.join("cube-image")),
            userland: self.image_userland.unwrap_or(usual),
            quota: self.image_quota,
            memory: half.min(MEMORY),
            registries,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_name_a_domain_and_a_server() {
        let mirror: Mirror = "127.0.0.1:5000=http://127.0.0.1:5000".parse().unwrap();
        assert_eq!(mirror.domain, "127.0.0.1:5000");
        assert_eq!(mirror.endpoint.to_string(), "http://127.0.0.1:5000");
        for wrong in [
            "docker.io",
            "=http://a",
            "docker.io=mirror:5000",
            "docker.io/library=http://a",
            "docker.io=http://a/path",
        ] {
            let why = wrong.parse::<Mirror>().unwrap_err();
            assert!(why.contains("DOMAIN=URL"), "{wrong}: {why}");
        }
    }
}
