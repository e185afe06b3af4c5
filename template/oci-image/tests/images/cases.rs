//! Hard cases of single archives and of merging.

use oci_image::{
    Limits,
    tar::{self, Budget, Entry, EntryKind, TarError},
    tree::{Fault, MergeError, Tree},
};

use crate::{
    archive::{Item, dir, file, hardlink, header, item, pack, seal, symlink},
    listing::{Listing, of_tree},
};

pub(crate) fn read(archive: &[u8]) -> Result<Vec<Entry>, TarError> {
    tar::read(&archive, 0, &mut Budget::new(&Limits::default()))
}

/// Merges layers.
pub(crate) fn merge(layers: &[Vec<Item>]) -> Result<Listing, MergeError> {
    let archives: Vec<_> = layers.iter().map(|items| pack(items)).collect();
    let mut tree = Tree::new(&Limits::default());
    let mut budget = Budget::new(&Limits::default());
    for (layer, archive) in archives.iter().enumerate() {
        let layer = u32::try_from(layer).unwrap();
        tree.apply(tar::read(&archive.as_slice(), layer, &mut budget).unwrap())?;
    }
    let sources: Vec<_> = archives.iter().map(Vec::as_slice).collect();
    Ok(of_tree(&tree, &sources))
}

fn names(listing: &Listing) -> Vec<&str> {
    let names = listing
        .keys()
        .map(|name| std::str::from_utf8(name).unwrap());
    names.filter(|name| !name.is_empty()).collect()
}

fn fault(layers: &[Vec<Item>]) -> Fault {
    merge(layers).unwrap_err().fault
}

#[test]
fn an_opaque_whiteout_hides_the_layers_below_wherever_it_is_in_its_layer() {
    let lower = vec![
        dir("d"),
        file("d/old", ""),
        dir("d/sub"),
        file("d/sub/old", ""),
    ];
    let opaque = file("d/.wh..wh..opq", "");
    let before = vec![dir("d"), opaque.clone(), file("d/new", "")];
    let after = vec![dir("d"), file("d/new", ""), opaque];
    for upper in [before, after] {
        let listing = merge(&[lower.clone(), upper]).unwrap();
        assert_eq!(names(&listing), ["/d", "/d/new"]);
    }
}

#[test]
fn a_whiteout_hides_only_what_is_below_its_layer() {
    let lower = vec![file("a", "old"), dir("b"), file("b/old", ""), file("c", "")];
    let upper = vec![
        file("a", "new"),
        file(".wh.a", ""),
        dir("b"),
        file("b/new", ""),
        file(".wh.b", ""),
        file(".wh.c", ""),
        file(".wh.missing", ""),
        // This is a whiteout of a name that no file can have, not the opaque marker.
        file("b/.wh..wh..opqX", ""),
    ];
    let listing = merge(&[lower, upper]).unwrap();
    assert_eq!(names(&listing), ["/a", "/b", "/b/new"]);
    assert!(listing[&b"/a"[..]].content.starts_with("3 "));
}

#[test]
fn whiteouts_without_a_name_are_refused() {
    for path in [".wh.", ".wh..", ".wh...", "a/.wh.", ".wh.a/b"] {
        assert_eq!(fault(&[vec![file(path, "")]]), Fault::Whiteout, "{path}");
    }
}

#[test]
fn a_hard_link_may_refer_to_a_lower_layer_and_survives_the_other_name() {
    let layers = [
        vec![file("a", "content"), symlink("l", "a")],
        vec![hardlink("b", "a"), hardlink("m", "l")],
        vec![file("a", "other")],
    ];
    let listing = merge(&layers[..2]).unwrap();
    assert_eq!(listing[&b"/b"[..]].first, b"/a");
    assert_eq!(listing[&b"/a"[..]].links, 2);
    assert_eq!(listing[&b"/m"[..]].content, "a");
    let listing = merge(&layers).unwrap();
    assert_eq!(listing[&b"/b"[..]].links, 1);
    assert!(listing[&b"/b"[..]].content.starts_with("7 "));
}

#[test]
fn hard_links_to_nothing_or_to_a_directory_are_refused() {
    for target in ["missing", "d", "", "d/../d/f", "/"] {
        let layer = vec![dir("d"), hardlink("x", target)];
        let fault = fault(&[layer]);
        let expected = matches!(fault, Fault::Hardlink(_) | Fault::Parent);
        assert!(expected, "{target}: {fault}");
    }
}

#[test]
fn a_directory_replaces_a_symbolic_link_of_its_name() {
    let lower = vec![
        dir("target"),
        file("target/kept", ""),
        symlink("d", "target"),
    ];
    let upper = vec![dir("d"), file("d/new", "")];
    let listing = merge(&[lower.clone(), upper]).unwrap();
    assert_eq!(names(&listing), ["/d", "/d/new", "/target", "/target/kept"]);
    // Without an entry for the directory, the file goes to the target of the link.
    let listing = merge(&[lower, vec![file("d/new", "")]]).unwrap();
    assert_eq!(
        names(&listing),
        ["/d", "/target", "/target/kept", "/target/new"]
    );
}

#[test]
fn links_never_lead_out_of_the_tree() {
    let listing = merge(&[vec![
        symlink("a", "/../../etc"),
        symlink("b", "../../../b2"),
        file("a/x", ""),
        file("b/y", ""),
        file("/abs", ""),
    ]]);
    let listing = listing.unwrap();
    assert_eq!(
        names(&listing),
        ["/a", "/abs", "/b", "/b2", "/b2/y", "/etc", "/etc/x"]
    );
    assert_eq!(fault(&[vec![file("../x", "")]]), Fault::Parent);
    assert_eq!(fault(&[vec![file("a/../../x", "")]]), Fault::Parent);
    let circle = vec![symlink("a", "b"), symlink("b", "a"), file("a/x", "")];
    assert_eq!(fault(&[circle]), Fault::Loop);
}

#[test]
fn devices_are_refused_except_below_dev() {
    for kind in [b'3', b'4'] {
        assert_eq!(fault(&[vec![item("x", kind)]]), Fault::Device);
        assert_eq!(fault(&[vec![item("dev", kind)]]), Fault::Device);
        assert_eq!(fault(&[vec![item("a/dev/x", kind)]]), Fault::Device);
        let listing = merge(&[vec![dir("dev"), item("./dev/null", kind)]]).unwrap();
        assert_eq!(names(&listing), ["/dev"]);
    }
}

#[test]
fn set_user_id_and_file_capabilities_are_kept_and_labels_are_not() {
    let caps = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let item = file("ping", "x")
        .mode(0o4755)
        .xattr("security.capability", caps)
        .xattr("user.note", "\0\n=")
        .xattr("security.selinux", "label")
        .xattr("trusted.overlay.opaque", "y");
    let listing = merge(&[vec![item.owner(70_000, 3)]]).unwrap();
    let record = &listing[&b"/ping"[..]];
    assert_eq!((record.mode, record.owner), (0o104_755, (70_000, 3)));
    let names: Vec<_> = record.xattrs.keys().collect();
    assert_eq!(names, [&b"security.capability"[..], b"user.note"]);
    let large = vec![0; 61 << 10];
    let item = file("x", "").xattr("user.a", large);
    assert_eq!(fault(&[vec![item]]), Fault::Xattrs);
}

#[test]
fn paths_may_have_4000_bytes_and_newlines() {
    let long = vec!["n".repeat(99); 40].join("/");
    assert_eq!(long.len(), 3999);
    let listing = merge(&[vec![
        file(&long, "x"),
        file("a\nb", ""),
        file("\u{1}\u{7f}", ""),
    ]]);
    let listing = listing.unwrap();
    assert!(listing.contains_key(format!("/{long}").as_bytes()));
    assert!(listing.contains_key(&b"/a\nb"[..]));
    assert_eq!(fault(&[vec![file("n".repeat(256), "")]]), Fault::TooLong);
    assert_eq!(fault(&[vec![file("n/".repeat(2049), "")]]), Fault::TooLong);
    assert_eq!(
        fault(&[vec![symlink("a", "n".repeat(4096))]]),
        Fault::Target
    );
}

#[test]
fn the_last_entry_of_a_name_counts_and_directories_are_merged() {
    let listing = merge(&[vec![
        file("a", "1"),
        file("a", "22"),
        dir("d"),
        file("d/x", ""),
        dir("d/").mode(0o700),
        dir("./").mode(0o711),
    ]]);
    let listing = listing.unwrap();
    assert_eq!(names(&listing), ["/a", "/d", "/d/x"]);
    assert!(listing[&b"/a"[..]].content.starts_with("2 "));
    assert_eq!(listing[&b"/d"[..]].mode, 0o040_700);
    assert_eq!(listing[&b""[..]].mode, 0o040_711);
    assert_eq!(fault(&[vec![file("./", "")]]), Fault::Root);
}

#[test]
fn sparse_files_of_all_formats_have_the_same_content() {
    let data = [vec![b'a'; 512], vec![b'b'; 512]].concat();
    let name = |minor: &str| file("GNUSparseFile.0/s", &data).record("GNU.sparse.minor", minor);
    let pairs = [
        ("offset", "1024"),
        ("numbytes", "512"),
        ("offset", "4096"),
        ("numbytes", "512"),
    ];
    let v00 = pairs.iter().fold(name("0"), |item, (key, value)| {
        item.record(&format!("GNU.sparse.{key}"), value)
    });
    let v00 = v00.record("GNU.sparse.size", "8192").record("path", "s");
    let v01 = name("1").record("GNU.sparse.map", "1024,512,4096,512");
    let v01 = v01
        .record("GNU.sparse.size", "8192")
        .record("GNU.sparse.name", "s");
    let mut map = b"2\n1024\n512\n4096\n512\n".to_vec();
    map.resize(512, 0);
    let mut v10 = name("0").record("GNU.sparse.major", "1");
    v10 = v10
        .record("GNU.sparse.realsize", "8192")
        .record("GNU.sparse.name", "s");
    v10.content = [map, data.clone()].concat();
    let mut old = header(&item("s", b'S'), data.len());
    old[257..265].copy_from_slice(b"ustar  \0");
    for (at, number) in [
        (386, 1024),
        (398, 512),
        (410, 4096),
        (422, 512),
        (483, 8192),
    ] {
        old[at..at + 12].copy_from_slice(format!("{number:011o}\0").as_bytes());
    }
    seal(&mut old);
    let old = [&old[..], &data, &[0; 1024]].concat();
    let mut want = vec![0; 8192];
    want[1024..1536].fill(b'a');
    want[4096..4608].fill(b'b');
    let plain = merge(&[vec![file("s", &want)]]).unwrap();
    for archive in [pack(&[v00]), pack(&[v01]), pack(&[v10]), old] {
        let mut tree = Tree::new(&Limits::default());
        tree.apply(read(&archive).unwrap()).unwrap();
        let listing = of_tree(&tree, &[archive.as_slice()]);
        assert_eq!(listing[&b"/s"[..]].content, plain[&b"/s"[..]].content);
    }
    for map in [
        "0,512,256,512",
        "0,1024,8192,0,9000,0",
        "0,512",
        "8000,1024",
        "0",
    ] {
        let bad = name("1").record("GNU.sparse.map", map);
        let bad = bad.record("GNU.sparse.size", "8192");
        assert!(read(&pack(&[bad])).is_err(), "{map}");
    }
}

#[test]
fn malformed_archives_are_errors() {
    let good = pack(&[file("a", vec![1; 600]), dir("b")]);
    assert_eq!(read(&good).unwrap().len(), 2);
    // The trailer may be missing, but not a part of an entry.
    assert_eq!(read(&good[..3 * 512]).unwrap().len(), 1);
    for cut in [1, 511, 513, 512 + 599] {
        assert!(read(&good[..cut]).is_err(), "{cut}");
    }
    let mut sum = good.clone();
    sum[0] = b'z';
    assert!(matches!(read(&sum), Err(TarError::Header { at: 0, .. })));
    let unknown = read(&pack(&[item("x", b'V')])).unwrap_err();
    assert!(matches!(unknown, TarError::Kind { kind: 'V', .. }));
    let huge = pack(&[file("x", "").record("size", "18446744073709551615")]);
    assert!(matches!(read(&huge), Err(TarError::Truncated(_))));
    let owner = pack(&[file("x", "").record("uid", "4294967295")]);
    assert!(matches!(read(&owner), Err(TarError::Header { .. })));
    let gap = [&good[..2048], &[0; 512], &good[..512], &[0; 1024]].concat();
    assert!(matches!(read(&gap), Err(TarError::Header { .. })));
}

#[test]
fn the_size_of_a_pax_header_counts_so_that_nothing_is_smuggled() {
    // A reader that uses the header's size (0) would parse the content as another entry.
    let inner = pack(&[file("smuggled", "")]);
    let mut outer = file("outer", "").record("size", inner.len().to_string());
    outer.content = Vec::new();
    let mut archive = pack(&[outer]);
    archive.truncate(archive.len() - 1024);
    archive.extend(&inner);
    archive.extend([0; 1024]);
    let entries = read(&archive).unwrap();
    assert_eq!(entries.len(), 1);
    assert!(matches!(&entries[0].kind, EntryKind::File(c) if c.size == inner.len() as u64));
}

#[test]
fn the_limits_of_entries_names_and_steps_hold() {
    let small = Limits {
        entries: 10,
        metadata: 4000,
        steps: 100,
        ..Limits::default()
    };
    let apply = |items: &[Item]| {
        let mut budget = Budget::new(&small);
        let entries = tar::read(&pack(items).as_slice(), 0, &mut budget);
        let entries = entries.map_err(|error| error.to_string())?;
        Tree::new(&small)
            .apply(entries)
            .map_err(|error| error.to_string())
    };
    let files = |n: usize| (0..n).map(|i| file(i.to_string(), "")).collect::<Vec<_>>();
    assert_eq!(apply(&files(10)), Ok(()));
    assert!(apply(&files(11)).unwrap_err().contains("10 entries"));
    let long = [file("n/".repeat(2000), "")];
    assert!(apply(&long).unwrap_err().contains("4000 bytes"));
    let deep = [file("n/".repeat(20) + "x", "")];
    assert!(apply(&deep).unwrap_err().contains("10 files"));
    let few = Limits {
        steps: 15,
        ..Limits::default()
    };
    let deep = read(&pack(&[dir("a/b/c/d"), file("a/b/c/d/e", "")])).unwrap();
    let mut tree = Tree::new(&few);
    assert_eq!(tree.apply(deep.clone()), Ok(()));
    assert_eq!(tree.apply(deep).unwrap_err().fault, Fault::Steps(15));
}

#[test]
fn fifty_thousand_entries_become_an_image() {
    let mut archive = Vec::new();
    for i in 0..50_000_u32 {
        let path = format!("d{}/{}/f{i}", i / 10_000, i / 100 % 100);
        archive.extend(header(&file(path, ""), 0));
    }
    let mut tree = Tree::new(&Limits::default());
    tree.apply(read(&archive).unwrap()).unwrap();
    assert!(tree.find(b"/d4/99/f49999").is_some());
    let out = tempfile::tempfile().unwrap();
    let written = oci_image::erofs::write(&tree, &[archive.as_slice()], &out, &Limits::default());
    assert_eq!(written.unwrap().inodes, 50_000 + 5 * 101 + 1);
}
