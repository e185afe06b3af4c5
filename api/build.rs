//! Embeds `console/dist`: writes a list of its files for `control::console`, each compressed once, here.

use std::{
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};

fn main() -> io::Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../console/dist");
    println!("cargo::rerun-if-changed={}", dist.display());
    let mut names: Vec<String> = fs::read_dir(&dist)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<_>>()?;
    names.sort();
    let mut list = String::from("&[\n");
    for name in &names {
        let content = fs::read(dist.join(name))?;
        let file = out.join(format!("{name}.gz"));
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&content)?;
        fs::write(&file, encoder.finish()?)?;
        list.push_str(&format!("    ({name:?}, include_bytes!({file:?})),\n"));
    }
    list.push_str("]\n");
    fs::write(out.join("console.rs"), list)?;
    fs::copy(dist.join("index.html"), out.join("index.html"))?;
    Ok(())
}
