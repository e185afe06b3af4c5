//! Lists the shipped scenarios, with which `check::division` compares recorded ones.

use std::{
    env,
    error::Error,
    fs, io,
    path::{Path, PathBuf},
};

fn main() -> Result<(), Box<dyn Error>> {
    let dir = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../scenarios");
    println!("cargo:rerun-if-changed={}", dir.display());
    println!("cargo:rerun-if-changed=build.rs");
    let files = fs::read_dir(&dir)?.map(|file| Ok(file?.path()));
    let mut files: Vec<PathBuf> = files.collect::<io::Result<_>>()?;
    files.sort();
    let mut list = String::new();
    for path in files {
        let name = path.file_stem().and_then(|name| name.to_str());
        let is_toml = path.extension().is_some_and(|ending| ending == "toml");
        if let Some(name) = name.filter(|name| is_toml && *name != "defaults") {
            list.push_str(&format!("({name:?}, include_str!({path:?})),\n"));
        }
    }
    let out = Path::new(&env::var("OUT_DIR")?).join("shipped.rs");
    Ok(fs::write(out, format!("&[\n{list}]\n"))?)
}
