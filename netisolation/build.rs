//! Compiles the eBPF programs with clang, and hashes the layout of their maps. A server takes over its predecessor's
//! maps only if their hashes are the same.

#[path = "build/layout_hash.rs"]
mod layout_hash;

use std::{
    env,
    error::Error,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

/// Debian's name of the tested version, then any installed version.
const COMPILERS: [&str; 2] = ["clang-14", "clang"];
/// The files that define the maps' keys, values and declarations.
const LAYOUT_FILES: [&str; 2] = ["layout.h", "maps.h"];

fn main() -> Result<(), Box<dyn Error>> {
    let sources = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("bpf");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo:rerun-if-changed={}", sources.display());
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    let mut layout = Vec::new();
    for name in LAYOUT_FILES {
        layout.push(fs::read_to_string(sources.join(name))?);
    }
    let hash = layout_hash::layout_hash(layout.iter().map(String::as_str));
    println!("cargo:rustc-env=MAP_LAYOUT={hash:016x}");
    for name in ["net", "connect"] {
        let (source, object) = (format!("{name}.bpf.c"), format!("{name}.bpf.o"));
        compile(&sources.join(source), &out.join(object))?;
    }
    Ok(())
}

fn compile(source: &Path, object: &Path) -> Result<(), Box<dyn Error>> {
    let architecture = env::var("CARGO_CFG_TARGET_ARCH")?;
    for compiler in COMPILERS {
        let outcome = Command::new(compiler)
            .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3"])
            .args(["-Wall", "-Wextra", "-Werror"])
            .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
            .arg("-c")
            .arg(source)
            .arg("-o")
            .arg(object)
            .status();
        match outcome {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => {
                return Err(format!(
                    "{compiler} could not compile {}: {status}",
                    source.display()
                )
                .into());
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(
        "clang was not found; it compiles the eBPF programs: apt install clang linux-libc-dev"
            .into(),
    )
}
