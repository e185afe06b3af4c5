//! Compiles the eBPF programs with clang, and names the layout of their maps by a hash: a server takes over the maps
//! of its predecessor only if the hash is the same.

use std::{
    env,
    error::Error,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

/// What Debian calls it, newest of the tested ones first; then whatever is there.
const COMPILERS: [&str; 2] = ["clang-14", "clang"];

fn main() -> Result<(), Box<dyn Error>> {
    let sources = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("bpf");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo:rerun-if-changed={}", sources.display());
    println!("cargo:rustc-env=MAP_LAYOUT={:016x}", layout(&sources)?);
    compile(&sources.join("net.bpf.c"), &out.join("net.bpf.o"))
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
                return Err(format!("{compiler} on {}: {status}", source.display()).into());
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err("no clang to compile the eBPF programs: apt install clang linux-libc-dev".into())
}

/// FNV-1a of the shared structures and of the maps' declarations.
fn layout(sources: &Path) -> Result<u64, Box<dyn Error>> {
    let structures = fs::read_to_string(sources.join("layout.h"))?;
    let programs = fs::read_to_string(sources.join("net.bpf.c"))?;
    let maps = programs.lines().filter(|line| line.starts_with("MAP("));
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    Ok(structures
        .lines()
        .chain(maps)
        .flat_map(str::bytes)
        .fold(0xcbf2_9ce4_8422_2325, hash))
}
