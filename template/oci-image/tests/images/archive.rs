//! Writes layers and OCI layouts.

use std::{fs, io::Write, path::Path};

use flate2::{Compression, write::GzEncoder};
use oci_image::digest::Digest;

/// An entry of an archive.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: u8,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u32,
    pub(crate) owner: (u64, u64),
    pub(crate) mtime: u64,
    pub(crate) records: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) content: Vec<u8>,
}

pub(crate) fn item(path: impl AsRef<[u8]>, kind: u8) -> Item {
    Item {
        path: path.as_ref().to_vec(),
        kind,
        link: Vec::new(),
        mode: 0o755,
        owner: (0, 0),
        mtime: 1_700_000_000,
        records: Vec::new(),
        content: Vec::new(),
    }
}

pub(crate) fn file(path: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> Item {
    Item {
        content: content.as_ref().to_vec(),
        mode: 0o644,
        ..item(path, b'0')
    }
}

pub(crate) fn dir(path: impl AsRef<[u8]>) -> Item {
    item(path, b'5')
}

pub(crate) fn symlink(path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Item {
    Item {
        link: target.as_ref().to_vec(),
        mode: 0o777,
        ..item(path, b'2')
    }
}

pub(crate) fn hardlink(path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Item {
    Item {
        link: target.as_ref().to_vec(),
        ..item(path, b'1')
    }
}

impl Item {
    pub(crate) fn mode(self, mode: u32) -> Self {
        Self { mode, ..self }
    }

    pub(crate) fn owner(self, uid: u64, gid: u64) -> Self {
        let owner = (uid, gid);
        Self { owner, ..self }
    }

    pub(crate) fn record(mut self, key: &str, value: impl AsRef<[u8]>) -> Self {
        let pair = (key.as_bytes().to_vec(), value.as_ref().to_vec());
        self.records.push(pair);
        self
    }

    pub(crate) fn xattr(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.record(&format!("SCHILY.xattr.{name}"), value)
    }
}

/// An archive of these entries, with PAX headers where they are needed.
pub(crate) fn pack(items: &[Item]) -> Vec<u8> {
    let mut out = Vec::new();
    for item in items {
        let mut records = item.records.clone();
        for (key, text) in [(&b"path"[..], &item.path), (b"linkpath", &item.link)] {
            if text.len() > 100 {
                records.push((key.to_vec(), text.clone()));
            }
        }
        if item.owner.0 > 0o7_777_777 {
            let uid = item.owner.0.to_string().into_bytes();
            records.push((b"uid".to_vec(), uid));
        }
        if !records.is_empty() {
            let text: Vec<u8> = records.iter().flat_map(|(k, v)| record(k, v)).collect();
            append(&mut out, &self::item("pax", b'x'), &text);
        }
        append(&mut out, item, &item.content);
    }
    out.resize(out.len() + 1024, 0);
    out
}

/// `LENGTH KEY=VALUE\n`, where the length includes itself.
fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = [b" ", key, b"=", value, b"\n"].concat();
    let mut len = rest.len() + 1;
    while len != rest.len() + len.to_string().len() {
        len = rest.len() + len.to_string().len();
    }
    [len.to_string().as_bytes(), &rest].concat()
}

fn append(out: &mut Vec<u8>, item: &Item, content: &[u8]) {
    out.extend(header(item, content.len()));
    out.extend(content);
    out.resize(out.len().next_multiple_of(512), 0);
}

/// A header block with a valid checksum.
pub(crate) fn header(item: &Item, size: usize) -> [u8; 512] {
    let mut block = [0; 512];
    let mut put = |at: usize, bytes: &[u8], most: usize| {
        let bytes = &bytes[..bytes.len().min(most)];
        block[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(0, &item.path, 100);
    put(100, format!("{:07o}", item.mode).as_bytes(), 8);
    put(
        108,
        format!("{:07o}", item.owner.0 & 0o7_777_777).as_bytes(),
        8,
    );
    put(116, format!("{:07o}", item.owner.1).as_bytes(), 8);
    put(124, format!("{size:011o}").as_bytes(), 12);
    put(136, format!("{:011o}", item.mtime).as_bytes(), 12);
    put(148, b"        ", 8);
    put(156, &[item.kind], 1);
    put(157, &item.link, 100);
    put(257, b"ustar\x0000", 8);
    seal(&mut block);
    block
}

/// Writes the checksum into a header block.
pub(crate) fn seal(block: &mut [u8; 512]) {
    block[148..156].copy_from_slice(b"        ");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An image: manifest, config and compressed layers.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) manifest: Vec<u8>,
    pub(crate) config: Vec<u8>,
    pub(crate) layers: Vec<Vec<u8>>,
}

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn descriptor(kind: &str, bytes: &[u8]) -> String {
    let (digest, size) = (Digest::of(bytes), bytes.len());
    format!(
        r#"{{"mediaType":"application/vnd.oci.image.{kind}","digest":"{digest}","size":{size}}}"#
    )
}

/// Like [`gzip`], without compression.
pub(crate) fn stored(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::none());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An image of these archives, compressed with gzip.
pub(crate) fn image(archives: &[Vec<u8>]) -> Image {
    image_by(archives, gzip)
}

/// An image of these archives, compressed with `gzip`.
pub(crate) fn image_by(archives: &[Vec<u8>], gzip: fn(&[u8]) -> Vec<u8>) -> Image {
    let ids: Vec<_> = archives
        .iter()
        .map(|a| format!("{:?}", Digest::of(a).to_string()))
        .collect();
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Env":["A=b"]}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        ids.join(",")
    );
    let layers: Vec<_> = archives.iter().map(|archive| gzip(archive)).collect();
    let list: Vec<_> = layers
        .iter()
        .map(|l| descriptor("layer.v1.tar+gzip", l))
        .collect();
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{},"layers":[{}]}}"#,
        descriptor("config.v1+json", config.as_bytes()),
        list.join(",")
    );
    Image {
        manifest: manifest.into_bytes(),
        config: config.into_bytes(),
        layers,
    }
}

impl Image {
    /// Manifest, config and layers.
    pub(crate) fn blobs(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.layers.iter().chain([&self.config, &self.manifest])
    }

    /// Writes an OCI layout with the tag `latest`.
    pub(crate) fn write_layout(&self, dir: &Path) {
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        for blob in self.blobs() {
            fs::write(blobs.join(Digest::of(blob).hex()), blob).unwrap();
        }
        fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let manifest = descriptor("manifest.v1+json", &self.manifest);
        let manifest = manifest.trim_end_matches('}');
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{manifest},"annotations":{{"org.opencontainers.image.ref.name":"latest"}}}}]}}"#
        );
        fs::write(dir.join("index.json"), index).unwrap();
    }
}
