//! Writes cpio archives in the "newc" format, which the kernel unpacks as initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst). The output is reproducible: all times are zero, all
//! owners are root, inode numbers count up.

use anyhow::{Context, Result};

/// An archive to which entries can be added.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER: u32 = 0o020_000;

impl Archive {
    pub(crate) fn directory(&mut self, name: &str) -> Result<()> {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[])
    }

    pub(crate) fn file(&mut self, name: &str, permissions: u32, data: &[u8]) -> Result<()> {
        self.entry(name, REGULAR | permissions, (0, 0), data)
    }

    /// Adds a character device. `number` is its major and minor number.
    pub(crate) fn device(
        &mut self,
        name: &str,
        permissions: u32,
        number: (u32, u32),
    ) -> Result<()> {
        self.entry(name, CHARACTER | permissions, number, &[])
    }

    /// Appends the trailer and pads the archive to a multiple of 512 bytes.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>> {
        self.entries = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        Ok(self.bytes)
    }

    fn entry(&mut self, name: &str, mode: u32, number: (u32, u32), data: &[u8]) -> Result<()> {
        let too_large = || format!("{name} is too large for a cpio archive");
        let size = u32::try_from(data.len()).with_context(too_large)?;
        let name_size = u32::try_from(name.len() + 1).with_context(too_large)?;
        let links = if mode & DIRECTORY == 0 { 1 } else { 2 };
        let (major, minor) = number;
        let fields = [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            size,
            0,
            0,
            major,
            minor,
            name_size,
            0,
        ];
        self.entries += 1;
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_newc_headers_and_aligned_data() {
        let mut archive = Archive::default();
        archive.directory("dev").unwrap();
        archive.device("dev/console", 0o600, (5, 1)).unwrap();
        archive.file("init", 0o755, b"#!").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with("07070100000000000041ED"));
        assert_eq!(text.matches("070701").count(), 4);
        let console = text.find("dev/console").unwrap();
        assert_eq!(&text[console - 32..console - 16], "0000000500000001");
        let init = text.find("init\0").unwrap();
        assert_eq!((init - 110) % 4, 0);
        assert_eq!(&text[(init + 5).next_multiple_of(4)..][..2], "#!");
    }
}
