//! The archive of a COPY's files: tar, with GNU records for long names. Owners and times are zero: the server recognizes its
//! steps by the hash of the files.

use std::{
    fs::{self, File},
    io::{self, Seek},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
};

use tar::{Builder, EntryType, Header};

use super::context::Files;

/// Packs the files into a file without a name. Returns it at its start, and its length.
pub(super) fn pack(files: &Files) -> io::Result<(File, u64)> {
    let mut archive = Builder::new(tempfile::tempfile()?);
    for path in &files.paths {
        let full = files.root.join(path);
        let found = fs::symlink_metadata(&full)?;
        let mut header = Header::new_gnu();
        header.set_mode(found.mode() & 0o7777);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(0);
        if found.is_dir() {
            header.set_entry_type(EntryType::Directory);
            archive.append_data(&mut header, path, io::empty())?;
        } else if found.is_symlink() {
            header.set_entry_type(EntryType::Symlink);
            let target = fs::read_link(&full)?;
            // `append_link` writes short targets without repeated slashes and dots.
            match header.set_link_name_literal(target.as_os_str().as_bytes()) {
                Ok(()) => archive.append_data(&mut header, path, io::empty())?,
                Err(_) => archive.append_link(&mut header, path, target)?,
            }
        } else if found.is_file() {
            header.set_size(found.len());
            let mut content = File::open(&full)?;
            archive.append_data(&mut header, path, &content)?;
            if content.stream_position()? != found.len() {
                let why = format!("{} changed while it was read", full.display());
                return Err(io::Error::other(why));
            }
        }
    }
    let mut archive = archive.into_inner()?;
    let length = archive.stream_position()?;
    archive.rewind()?;
    Ok((archive, length))
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
