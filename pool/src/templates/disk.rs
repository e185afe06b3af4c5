//! Disk templates, and the files from which they boot.

use std::{
    fs,
    path::{Path, PathBuf},
};

use model::{Bytes, template_file};

use super::{Size, Template, Templates, bytes_of};
use crate::{
    record::BootFiles,
    spec::{TemplateInfo, TemplateKind},
};

/// Name of the installed template whose kernel is preferred.
const BASE: &str = "base";

/// Kernel and initramfs of this host's guests, for any root image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Guest {
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
    /// The installed directory of the template that provides them. Its recipe names the empty layer.
    pub(crate) installed: PathBuf,
}

impl Templates {
    /// Kernel and initramfs of the installed template `base` or, without one, of the first by id that names them.
    pub(crate) fn guest(&self) -> Option<Guest> {
        let guest = |template: &Template| {
            let boot = template.boot.as_ref()?;
            Some(Guest {
                kernel: boot.kernel.clone(),
                initrd: boot.initrd.clone(),
                installed: template.rebuild.as_ref()?.installed.clone(),
            })
        };
        let is_base = |t: &&Template| t.info.names.iter().any(|name| name == BASE);
        let base = self.iter().filter(is_base).find_map(guest);
        base.or_else(|| self.iter().find_map(guest))
    }
}

/// Reads the disk template in `dir`.
///
/// # Errors
/// Returns a human-readable message if its layer or its root image cannot be read.
pub(super) fn read(dir: &Path, id: &str, size: Size, boot: &BootFiles) -> Result<Template, String> {
    let length = |path: &Path| {
        let meta = fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok::<_, String>(meta.len())
    };
    let disk = length(&dir.join(template_file::LAYER))?;
    length(&boot.root)?;
    let bytes = bytes_of(dir);
    let info = TemplateInfo {
        id: id.to_owned(),
        names: Vec::new(),
        memory: size.memory,
        vcpus: size.vcpus,
        disk: Bytes(disk),
        created_unix_s: 0,
        kind: TemplateKind::Disk,
        source: None,
        spawned: 0,
        warm: 0,
        vmm: None,
        bytes,
    };
    Ok(Template {
        boot: Some(boot.clone()),
        layer_bytes: bytes.0,
        ..Template::new(info, dir.to_owned(), boot.root.clone())
    })
}
