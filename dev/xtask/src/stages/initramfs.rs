//! The initramfs: the guest agent as /init, and the kernel modules that it loads before it mounts the root.
//!
//! ```text
//! init                the static guest agent, PID 1
//! modules/order       one file name of modules/ per line, in load order
//! modules/*.ko
//! dev proc sys run newroot
//! ```
//! Module parameters are on the kernel's command line as NAME.param=value, the form that modprobe reads.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::{
    stages::{
        bzimage,
        cpio::Archive,
        kernel::Kernel,
        stage::{Built, Recipe, Store},
    },
    workspace::{Workspace, read_list},
};

pub(crate) const FILE: &str = "initramfs.cpio";

pub(crate) fn build(
    store: &Store,
    workspace: &Workspace,
    kernel: &Kernel,
    guest_module: &Path,
    agent: &Path,
) -> Result<Built> {
    let list = workspace.recipe("kernel/initramfs-modules.txt");
    let recipe = Recipe::new("initramfs")
        .text("form", "1")
        .stage("kernel", &kernel.built)
        .path("guest module", guest_module)?
        .path("agent", agent)?
        .path("list", &list)?;
    let place = format!("stages/initramfs{}", kernel.origin.ending());
    store.build(&recipe, &place, |out, _| {
        let mut modules = kernel.modules()?;
        modules.add(guest_module)?;
        let order = modules.load_order(&read_list(&list)?)?;
        Ok(fs::write(out.join(FILE), archive(agent, &order)?)?)
    })
}

fn archive(agent: &Path, modules: &[&Path]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for name in ["dev", "proc", "sys", "run", "newroot", "modules"] {
        archive.directory(name)?;
    }
    archive.device("dev/console", 0o600, (5, 1))?;
    let agent = fs::read(agent).with_context(|| format!("cannot read {}", agent.display()))?;
    archive.file("init", 0o755, &agent)?;
    add_modules(&mut archive, modules)?;
    archive.finish()
}

/// Adds kernel modules, and the file `modules/order` with their load order.
pub(crate) fn add_modules(archive: &mut Archive, modules: &[&Path]) -> Result<()> {
    let mut order = String::new();
    for file in modules {
        let name = plain_name(file)?;
        let data = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let path = format!("modules/{name}");
        archive.file(&path, 0o644, &bzimage::unpack_file(data)?)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes())
}

/// A module's file name without the extension of its compression.
fn plain_name(file: &Path) -> Result<String> {
    let name = file.file_name().and_then(|name| name.to_str());
    let (stem, _) = name
        .and_then(|name| name.split_once('.'))
        .with_context(|| format!("{} is not a kernel module", file.display()))?;
    Ok(format!("{stem}.ko"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_file_lists_the_file_names_of_the_modules() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, format!("\x7fELF{name}")).unwrap();
            path
        };
        let (agent, first, second) = (write("agent"), write("virtio-rng.ko"), write("erofs.ko"));
        let bytes = archive(&agent, &[&first, &second]).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("\0virtio-rng.ko\nerofs.ko\n\0"));
        for entry in ["init\0", "modules/virtio-rng.ko\0", "modules/erofs.ko\0"] {
            assert!(text.contains(entry), "{entry:?}");
        }
    }

    #[test]
    fn a_compressed_module_is_stored_as_ko() {
        assert_eq!(plain_name(Path::new("/a/ext4.ko.xz")).unwrap(), "ext4.ko");
        assert!(plain_name(Path::new("/a/modules")).is_err());
    }
}
