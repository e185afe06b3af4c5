//! The archive of a COPY's files: POSIX tar (pax, "ustar interchange format"), with GNU records for long names.

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
};

use super::context::Files;

const BLOCK: usize = 512;
const NAME: usize = 100;

/// Packs the files into a file without a name. Returns it at its begin, and its length.
pub(super) fn pack(files: &Files) -> io::Result<(File, u64)> {
    let mut archive = nameless()?;
    for path in &files.paths {
        let full = files.root.join(path);
        let found = fs::symlink_metadata(&full)?;
        let name = path.as_os_str().as_bytes();
        if found.is_dir() {
            entry(&mut archive, name, b"", b'5', found.mode(), 0)?;
        } else if found.is_symlink() {
            let target = fs::read_link(&full)?;
            let target = target.as_os_str().as_bytes();
            entry(&mut archive, name, target, b'2', found.mode(), 0)?;
        } else if found.is_file() {
            entry(&mut archive, name, b"", b'0', found.mode(), found.len())?;
            let mut content = File::open(&full)?;
            let copied = io::copy(&mut content, &mut archive)?;
            if copied != found.len() {
                let why = format!("{} changed while it was read", full.display());
                return Err(io::Error::other(why));
            }
            pad(&mut archive, copied)?;
        }
    }
    archive.write_all(&[0; 2 * BLOCK])?;
    let length = archive.stream_position()?;
    archive.seek(SeekFrom::Start(0))?;
    Ok((archive, length))
}

/// A file that disappears with its descriptor.
fn nameless() -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_TMPFILE)
        .mode(0o600)
        .open(std::env::temp_dir())
}

fn pad(archive: &mut impl Write, length: u64) -> io::Result<()> {
    let over = usize::try_from(length % BLOCK as u64).unwrap_or(0);
    let missing = (BLOCK - over) % BLOCK;
    archive.write_all(&vec![0; missing])
}

/// The header of an entry, after records for what does not fit into it.
fn entry(
    archive: &mut impl Write,
    name: &[u8],
    target: &[u8],
    kind: u8,
    mode: u32,
    size: u64,
) -> io::Result<()> {
    for (text, record) in [(name, b'L'), (target, b'K')] {
        if text.len() > NAME {
            let length = text.len() as u64 + 1;
            header(archive, b"././@LongLink", b"", record, 0, length)?;
            archive.write_all(text)?;
            archive.write_all(&[0])?;
            pad(archive, length)?;
        }
    }
    let short = |text: &[u8]| {
        text.get(..text.len().min(NAME))
            .unwrap_or_default()
            .to_vec()
    };
    header(archive, &short(name), &short(target), kind, mode, size)
}

fn header(
    archive: &mut impl Write,
    name: &[u8],
    target: &[u8],
    kind: u8,
    mode: u32,
    size: u64,
) -> io::Result<()> {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(room) = block.get_mut(at..at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    };
    put(0, name);
    put(100, format!("{:07o}", mode & 0o7777).as_bytes());
    put(108, b"0000000");
    put(116, b"0000000");
    put(124, &number(size));
    // Times do not matter: the server's steps are recognized by the hash.
    put(136, b"00000000000");
    put(148, b"        ");
    put(156, &[kind]);
    put(157, target);
    put(257, b"ustar  ");
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    let sum = format!("{sum:06o}\0 ");
    if let Some(room) = block.get_mut(148..156) {
        room.copy_from_slice(sum.as_bytes());
    }
    archive.write_all(&block)
}

/// A size in octal digits, or in GNU's binary form if that does not suffice.
fn number(size: u64) -> Vec<u8> {
    if size < 1 << 33 {
        return format!("{size:011o}").into_bytes();
    }
    let mut bytes = vec![0x80, 0, 0, 0];
    bytes.extend(size.to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::context::{Ignored, find};
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn tar_unpacks_what_was_packed() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let long = format!("{}/{}", "d".repeat(90), "f".repeat(90));
        let dir = from.path().join("s").join("d".repeat(90));
        fs::create_dir_all(dir).unwrap();
        fs::write(from.path().join("s").join(&long), vec![7; 1000]).unwrap();
        fs::write(from.path().join("s/empty"), "").unwrap();
        std::os::unix::fs::symlink("nowhere", from.path().join("s/link")).unwrap();
        let files = find(from.path(), &Ignored::default(), "s", "/x").unwrap();
        let (archive, length) = pack(&files).unwrap();
        assert_eq!(archive.metadata().unwrap().len(), length);
        let status = Command::new("tar")
            .args(["-x", "-C"])
            .arg(to.path())
            .stdin(Stdio::from(archive))
            .status()
            .unwrap();
        assert!(status.success());
        assert_eq!(
            fs::read(to.path().join("s").join(long)).unwrap(),
            vec![7; 1000]
        );
        assert_eq!(fs::read(to.path().join("s/empty")).unwrap(), b"");
        let link = fs::read_link(to.path().join("s/link")).unwrap();
        assert_eq!(link.to_str(), Some("nowhere"));
    }
}
