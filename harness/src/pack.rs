//! Packs: a recorded run in one archive that others can check.
//!
//! ```text
//! NAME.tar.zst    pack.json        SHA-256 of each file below
//!                 pack.json.sig    optional signature of pack.json (`ssh-keygen -Y sign`)
//!                 environment.json, events.jsonl, manifest.json, report.json
//! ```
//! A pack contains only what the checker verifies: no logs, and no reports that `cube-bench report` can make again.
//! Archives come from others: names, sizes and kinds of entries are checked before anything is written.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use ruzstd::{
    decoding::StreamingDecoder,
    encoding::{CompressionLevel, compress_to_vec},
};
use serde::{Deserialize, Serialize};

use crate::{
    host::facts::ENVIRONMENT_FILE,
    record::{self, EVENTS_FILE, MANIFEST_FILE, RecordError, read_optional},
};

/// The files of a run that belong into its pack.
pub(crate) const PACKED: [&str; 4] = [EVENTS_FILE, ENVIRONMENT_FILE, MANIFEST_FILE, REPORT_FILE];
pub(crate) const REPORT_FILE: &str = "report.json";
/// Name of the list of hashes in a pack.
pub const LIST_FILE: &str = "pack.json";
/// Name of the signature of [`LIST_FILE`].
pub const SIGNATURE_FILE: &str = "pack.json.sig";
/// Namespace of the signature, which `ssh-keygen` requires.
const NAMESPACE: &str = "cube-bench-pack";
const FORMAT: u32 = 1;
/// Largest sum of the sizes of the files in a pack. The largest published run has a tenth of it.
const MOST_BYTES: u64 = 1 << 30;

/// Contents of `pack.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackList {
    pub format: u32,
    /// SHA-256 of each file, by name.
    pub files: BTreeMap<String, String>,
}

/// A pack that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("cannot use {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot run ssh-keygen: install the OpenSSH client")]
    Keygen(#[source] io::Error),
    #[error("cannot sign with {key}: {why}")]
    Sign { key: PathBuf, why: String },
    #[error("{path} is neither a recorded run nor a pack: {why}")]
    Malformed { path: PathBuf, why: String },
}

pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> PackError {
    let path = path.to_owned();
    move |source| PackError::Io { path, source }
}

/// Writes the pack of the run in `dir` to the new file `out`, signed if `key`, a private SSH key, is given.
///
/// # Errors
/// Returns an error if the record cannot be read or was changed after the run, if `out` exists or cannot be written, or
/// if the key cannot be used.
pub fn write(dir: &Path, out: &Path, key: Option<&Path>) -> Result<PackList, PackError> {
    // Published runs have compressed events; in a pack, they are compressed once, with the other files.
    let (_, events) = record::read_with_text(dir)?;
    let mut files = vec![(EVENTS_FILE, events)];
    for name in PACKED.into_iter().filter(|name| *name != EVENTS_FILE) {
        let path = dir.join(name);
        let bytes = read_optional(&path).map_err(at(&path))?;
        files.extend(bytes.map(|bytes| (name, bytes)));
    }
    let sums = files.iter();
    let sums = sums.map(|(name, bytes)| ((*name).to_owned(), record::sha256(bytes)));
    let list = PackList {
        format: FORMAT,
        files: sums.collect(),
    };
    let text = serde_json::to_vec_pretty(&list).map_err(|e| at(out)(e.into()))?;
    if let Some(key) = key {
        files.insert(0, (SIGNATURE_FILE, sign(&text, key)?));
    }
    files.insert(0, (LIST_FILE, text));
    let tar = archive(&files).map_err(at(out))?;
    let compressed = compress_to_vec(tar.as_slice(), CompressionLevel::Fastest);
    let mut file = File::create_new(out).map_err(at(out))?;
    file.write_all(&compressed).map_err(at(out))?;
    Ok(list)
}

/// The same files make the same archive.
fn archive(files: &[(&str, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, bytes.as_slice())?;
    }
    builder.into_inner()
}

fn sign(text: &[u8], key: &Path) -> Result<Vec<u8>, PackError> {
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-Y", "sign", "-n", NAMESPACE, "-f"]).arg(key);
    let output = fed(keygen, text).map_err(PackError::Keygen)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(PackError::Sign {
        key: key.to_owned(),
        why: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Runs a program with `input` as its standard input.
fn fed(mut program: Command, input: &[u8]) -> io::Result<std::process::Output> {
    let streams = program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = streams.stderr(Stdio::piped()).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // The program may end without reading, and then explains why.
        let _ = stdin.write_all(input);
    }
    child.wait_with_output()
}

/// Unpacks a pack into the existing, empty directory `dir`. Its hashes are not checked.
///
/// # Errors
/// Returns an error if the file cannot be read, or is not an archive that [`write()`] could have written.
pub fn unpack(path: &Path, dir: &Path) -> Result<(), PackError> {
    let malformed = |why: String| PackError::Malformed {
        path: path.to_owned(),
        why,
    };
    let broken = |error: io::Error| malformed(error.to_string());
    let file = io::BufReader::new(File::open(path).map_err(at(path))?);
    let decoder = StreamingDecoder::new(file).map_err(|e| malformed(e.to_string()))?;
    let mut archive = tar::Archive::new(decoder.take(MOST_BYTES));
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let is_known = PACKED.contains(&&*name) || [LIST_FILE, SIGNATURE_FILE].contains(&&*name);
        if !is_known || !entry.header().entry_type().is_file() {
            return Err(malformed(format!("it contains {name:?}")));
        }
        let target = dir.join(&name);
        let mut target = File::create_new(&target).map_err(at(&target))?;
        let copied = io::copy(&mut entry, &mut target).map_err(broken)?;
        if copied != entry.size() {
            return Err(malformed(format!("{name} is cut off")));
        }
    }
    Ok(())
}

/// Reads the list of hashes. `None` if the directory was not unpacked from a pack.
///
/// # Errors
/// Returns [`PackError`] if it cannot be read, or has an unknown format.
pub fn read_list(dir: &Path) -> Result<Option<PackList>, PackError> {
    let path = dir.join(LIST_FILE);
    let malformed = |why| PackError::Malformed {
        path: path.clone(),
        why,
    };
    let Some(text) = read_optional(&path).map_err(at(&path))? else {
        return Ok(None);
    };
    let list: PackList = serde_json::from_slice(&text).map_err(|e| malformed(e.to_string()))?;
    if list.format != FORMAT {
        return Err(malformed(format!(
            "it has format {}, this program reads format {FORMAT}",
            list.format
        )));
    }
    Ok(Some(list))
}

/// Verifies the signature of `pack.json` in `dir` with a file of allowed signers, as ssh-keygen(1) describes it. Returns
/// the name of the signer, or why the signature does not count.
///
/// # Errors
/// Returns [`PackError`] if a file cannot be read or ssh-keygen cannot be run.
pub fn signer(dir: &Path, signers: &Path) -> Result<Result<String, String>, PackError> {
    let (list, signature) = (dir.join(LIST_FILE), dir.join(SIGNATURE_FILE));
    let text = fs::read(&list).map_err(at(&list))?;
    let keygen = |action: &str, of: &[&str]| {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-Y", action, "-n", NAMESPACE]).args(of);
        keygen.arg("-s").arg(&signature).arg("-f").arg(signers);
        fed(keygen, &text).map_err(PackError::Keygen)
    };
    let refused = |output: &std::process::Output| {
        let why = String::from_utf8_lossy(&output.stderr);
        why.lines().last().unwrap_or("it is not valid").to_owned()
    };
    let found = keygen("find-principals", &[])?;
    let names = String::from_utf8_lossy(&found.stdout).into_owned();
    let Some(name) = names.lines().next().filter(|_| found.status.success()) else {
        return Ok(Err(refused(&found)));
    };
    let verified = keygen("verify", &["-I", name])?;
    Ok(if verified.status.success() {
        Ok(name.to_owned())
    } else {
        Err(refused(&verified))
    })
}
