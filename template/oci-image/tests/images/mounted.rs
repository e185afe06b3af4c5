//! Root images, mounted by the kernel and compared with `umoci unpack`.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use oci_image::{
    Converter, Layer, Limits, Pulled, Resources, Store, config::Config, digest::Digest,
    manifest::Compression,
};

use crate::{
    archive::{Image, Item, dir, file, gzip, hardlink, image, item, pack, symlink},
    listing::{differences, of_directory},
};

/// A mounted image.
pub(crate) struct Mount(tempfile::TempDir);

impl Mount {
    pub(crate) fn of(image: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        run(Command::new("mount")
            .args(["-t", "erofs", "-o", "ro,loop"])
            .arg(image)
            .arg(dir.path()));
        Self(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.0.path()));
    }
}

pub(crate) fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
}

/// Converts without additions to images.
pub(crate) fn converter() -> Converter {
    let program = Path::new(env!("CARGO_BIN_EXE_cube-image"));
    Converter::new(program, Limits::default(), Resources::default())
}

/// Puts the image's blobs into the store, as a pull does.
pub(crate) fn pulled(image: &Image, store: &Store) -> Pulled {
    let config = Config::parse(&image.config, image.layers.len()).unwrap();
    let layers = image.layers.iter().zip(&config.diff_ids);
    let layers = layers.map(|(blob, diff_id)| Layer {
        blob: store.put(Digest::of(blob), blob).unwrap(),
        compression: Compression::Gzip,
        diff_id: *diff_id,
    });
    Pulled {
        digest: Digest::of(&image.manifest),
        layers: layers.collect(),
        config,
    }
}

/// All kinds of entries, over three layers.
fn rich() -> Vec<Vec<Item>> {
    let noise: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    let caps = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let acl = b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x05\0\xe8\x03\0\0\x04\0\x05\0\xff\xff\xff\xff\
        \x10\0\x05\0\xff\xff\xff\xff\x20\0\x05\0\xff\xff\xff\xff";
    let mut first = vec![
        dir("./").mode(0o755),
        dir("d").mode(0o1777),
        dir("many"),
        dir("sub").owner(1000, 100),
        dir("sub/below"),
        file("empty", ""),
        file("setuid", "x").mode(0o6755).owner(0, 5),
        file("caps", "x").xattr("security.capability", caps),
        file("acl", "x")
            .mode(0o755)
            .xattr("system.posix_acl_access", acl),
        file("attributes", "x")
            .xattr("user.a", vec![b'v'; 3000])
            .xattr("user.b", "w"),
        file("owner", "x").owner(4_000_000_000, 70_000),
        file("time", "x").record("mtime", "1234567890.123456789"),
        file("large", &noise),
        symlink("link", "sub/below"),
        symlink("dangling", "/no/where"),
        symlink("long", "t".repeat(4000)),
        hardlink("large2", "large"),
        item("fifo", b'6'),
        file("new\nline", ""),
        file("gone", ""),
        file("sub/hidden", ""),
        file("replaced", "file"),
    ];
    // Sizes around the limits at which data is inline, in blocks, or both.
    for size in [
        1, 3999, 4031, 4032, 4033, 4095, 4096, 4097, 8191, 8192, 8193, 12_000,
    ] {
        first.push(file(format!("size{size}"), &noise[..size]));
    }
    for i in 0..700 {
        first.push(file(
            format!("many/{i}-{}", "n".repeat(i % 200)),
            i.to_string(),
        ));
    }
    let long = vec!["n".repeat(99); 30].join("/");
    let second = vec![
        file(".wh.gone", ""),
        dir("sub").owner(1000, 100),
        file("sub/.wh..wh..opq", ""),
        file("sub/new", "n"),
        hardlink("again", "large"),
        file("large", "other"),
        dir("replaced"),
        file("replaced/inside", ""),
    ];
    vec![
        first,
        second,
        vec![file(long, "deep"), dir("d").mode(0o700)],
    ]
}

#[test]
fn image_of_all_kinds_is_the_same_as_by_umoci() {
    let image = image(&rich().iter().map(|layer| pack(layer)).collect::<Vec<_>>());
    let dir = tempfile::tempdir().unwrap();
    let (layout, bundle) = (dir.path().join("layout"), dir.path().join("bundle"));
    image.write_layout(&layout);
    let source = format!("{}:latest", layout.display());
    run(Command::new("umoci")
        .args(["unpack", "--image", &source])
        .arg(&bundle));
    let store = Store::open(&dir.path().join("store"), 1 << 30).unwrap();
    let pulled = pulled(&image, &store);
    let made = converter().convert(&pulled, &store).unwrap();
    let mount = Mount::of(&made.path());
    let mut ours = of_directory(mount.path());
    let mut theirs = of_directory(&bundle.join("rootfs"));
    // Link counts of directories depend on the file system, and so does the time of a directory without an entry.
    for listing in [&mut ours, &mut theirs] {
        for (path, record) in listing.iter_mut() {
            let is_directory = record.mode & 0o170_000 == 0o040_000;
            // umoci changes the root's time at the end.
            let is_implied = path.starts_with(b"/nnn") || path.is_empty();
            if is_directory {
                record.links = 0;
            }
            if is_directory && is_implied {
                record.mtime = (0, 0);
            }
        }
    }
    assert!(ours.len() > 750);
    assert_eq!(differences(&ours, &theirs), Vec::<String>::new());
    // A second conversion finds the image in the store.
    let again = converter().convert(&pulled, &store).unwrap();
    assert_eq!(again.path(), made.path());
}

#[test]
fn image_of_a_sparse_file_of_4_gib_takes_no_space() {
    // 4 GiB of zeros with a word at the end, as image tools store it: as plain data.
    let size: u64 = 4 << 30;
    let dir = tempfile::tempdir().unwrap();
    let archive: PathBuf = dir.path().join("layer.tar");
    let head = pack(&[Item {
        content: Vec::new(),
        ..file("disk", "")
    }
    .record("size", size.to_string())]);
    let out = fs::File::create(&archive).unwrap();
    use std::os::unix::fs::FileExt;
    let begin = head.len() as u64 - 1024;
    out.write_all_at(&head[..head.len() - 1024], 0).unwrap();
    out.write_all_at(b"end!", begin + size - 4).unwrap();
    out.set_len(begin + size + 1024).unwrap();
    let made = dir.path().join("image");
    let image = fs::File::create_new(&made).unwrap();
    // Hashing 4 GiB is slow without optimization, so the layer is used as if it were unpacked.
    let layer = Raw(fs::File::open(&archive).unwrap(), begin + size + 1024);
    let mut budget = oci_image::tar::Budget::new(&Limits::default());
    let entries = oci_image::tar::read(&layer, 0, &mut budget).unwrap();
    let mut tree = oci_image::tree::Tree::new(&Limits::default());
    tree.apply(entries).unwrap();
    oci_image::erofs::write(&tree, &[layer], &image, &Limits::default()).unwrap();
    let found = image.metadata().unwrap();
    assert!(
        found.len() > size && found.blocks() * 512 < 1 << 20,
        "{found:?}"
    );
    let mount = Mount::of(&made);
    let disk = fs::File::open(mount.path().join("disk")).unwrap();
    assert_eq!(disk.metadata().unwrap().len(), size);
    let mut end = [0; 8];
    disk.read_exact_at(&mut end, size - 8).unwrap();
    assert_eq!(&end, b"\0\0\0\0end!");
}

/// A file as a layer.
struct Raw(fs::File, u64);

impl oci_image::Source for Raw {
    fn size(&self) -> u64 {
        self.1
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, buffer, offset)
    }

    fn data(&self, range: std::ops::Range<u64>) -> std::io::Result<Vec<std::ops::Range<u64>>> {
        oci_image::Unpacked::new(self.0.try_clone()?)?.data(range)
    }
}

#[test]
fn conversion_errors_name_the_layer_and_leave_no_draft() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1 << 30).unwrap();
    let bad = image(&[pack(&[file("a", "")]), pack(&[item("x", b'3')])]);
    let error = converter()
        .convert(&pulled(&bad, &store), &store)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("layer 1 of the image cannot be applied: layer entry"),
        "{error}"
    );
    let mut other = image(&[pack(&[file("a", "")])]);
    other.layers[0] = gzip(b"not a tar");
    let error = converter()
        .convert(&pulled(&other, &store), &store)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("layer 0 of the image cannot be unpacked: "),
        "{error}"
    );
    assert_eq!(fs::read_dir(dir.path().join("drafts")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(dir.path().join("images")).unwrap().count(), 0);
}
