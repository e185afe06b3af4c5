//! Kernel modules of the initramfs.

use std::{ffi::CString, fs, fs::File, path::Path};

use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
};

use super::{BootError, CommandLine, cannot};

/// Lists file names in /modules, one per line, in loading order. Lines that begin with `#` are comments.
pub(super) const ORDER: &str = "/modules/order";

/// The module that announces devices to a guest without ACPI. If the command line has no parameters for it, it would
/// announce nothing and is skipped.
const ANNOUNCER: &str = "cube_mmio";

/// Loads all modules. A module that is loaded already is not an error.
pub(super) fn load_all(cmdline: &CommandLine<'_>) -> Result<(), BootError> {
    let order = fs::read_to_string(ORDER).map_err(cannot(format!("read {ORDER}")))?;
    let files = order.lines().map(str::trim);
    for file in files.filter(|line| !line.is_empty() && !line.starts_with('#')) {
        load(file, cmdline)?;
    }
    Ok(())
}

fn load(file: &str, cmdline: &CommandLine<'_>) -> Result<(), BootError> {
    let path = Path::new("/modules").join(file);
    let name = file.strip_suffix(".ko").unwrap_or(file).to_owned();
    let parameters = cmdline.module_parameters(&name);
    if name == ANNOUNCER && parameters.is_empty() {
        return Ok(());
    }
    let opened = File::open(&path).map_err(cannot(format!("open {}", path.display())))?;
    let text = CString::new(parameters.as_str()).unwrap_or_default();
    match finit_module(&opened, &text, ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(source) => Err(BootError::Module {
            name,
            parameters,
            source,
        }),
    }
}
