//! The images that templates are built from: section `images`.

use std::path::Path;

use builds::bases::ImagesSpec;
use model::Bytes;
use netisolation::Destinations;
use oci_image::registry::{Registries, docker_config};

use super::{network::forbidden, sections::ImagesSection, spec::Checks};

/// Memory of one conversion, if the server's memory has no limit.
const MEMORY: Bytes = Bytes::mib(4096);

/// `beside` is the directory of this program, `templates` the directory of templates, `memory` the server's memory
/// limit, and `denied` are the addresses that the operator denies.
pub(super) fn images(
    images: &ImagesSection,
    checks: &mut Checks<'_>,
    beside: &Path,
    templates: Option<&Path>,
    memory: Option<Bytes>,
    denied: &[Destinations],
) -> ImagesSpec {
    let mut registries = Registries {
        forbidden: forbidden(&images.exceptions, denied),
        ..Registries::default()
    };
    for mirror in images.mirrors.iter().map(|mirror| mirror.value.clone()) {
        let endpoints = registries.endpoints.entry(mirror.domain).or_default();
        endpoints.push(mirror.endpoint);
    }
    if let Some(path) = &images.credentials {
        let text = std::fs::read_to_string(path).map_err(|why| why.to_string());
        match text.and_then(|text| docker_config(&text).map_err(|why| model::chain(&why))) {
            Ok(credentials) => registries.credentials = credentials,
            Err(why) => checks.wrong("images.credentials", format!("{}: {why}", path.display())),
        }
    }
    let usual = templates
        .unwrap_or(&beside.join("../templates"))
        .join("../guest");
    // Half of the server's, because a conversion counts towards its memory.
    let half = memory.map_or(MEMORY, |memory| Bytes(memory.0 / 2));
    ImagesSpec {
        converter: (images.converter.clone()).unwrap_or_else(|| beside.join("cube-image")),
        userland: images.userland.clone().unwrap_or(usual),
        quota: images.quota,
        memory: half.min(MEMORY),
        registries,
    }
}
