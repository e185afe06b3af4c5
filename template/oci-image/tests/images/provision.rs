//! Additions to images of different kinds.

use oci_image::{
    Limits, Source,
    provision::{PROGRAMS, ProvisionError, Userland, provision},
    tree::Tree,
};

use crate::{
    archive::{Item, dir, file, hardlink, pack, symlink},
    cases::read,
    listing::{Listing, of_tree},
};

const BUSYBOX: &str = "/usr/lib/cube/busybox";

fn userland() -> Userland {
    Userland {
        bash: b"static bash".to_vec(),
        busybox: b"static busybox".to_vec(),
    }
}

/// The completed image of one layer, and its text files.
struct Provisioned {
    tree: Tree,
    archives: [Vec<u8>; 2],
    listing: Listing,
}

impl Provisioned {
    fn of(items: &[Item]) -> Result<Self, ProvisionError> {
        let archive = pack(items);
        let mut tree = Tree::new(&Limits::default());
        tree.apply(read(&archive).unwrap()).unwrap();
        let added = provision(&mut tree, &[archive.as_slice()], &userland(), 1)?;
        let archives = [archive, added];
        let listing = of_tree(&tree, &archives.each_ref().map(Vec::as_slice));
        Ok(Self {
            tree,
            archives,
            listing,
        })
    }

    fn has(&self, path: &str) -> bool {
        self.listing.contains_key(path.as_bytes())
    }

    fn mode(&self, path: &str) -> u32 {
        self.listing[path.as_bytes()].mode
    }

    fn owner(&self, path: &str) -> (u32, u32) {
        self.listing[path.as_bytes()].owner
    }

    /// The target of a symbolic link.
    fn link(&self, path: &str) -> &str {
        let record = &self.listing[path.as_bytes()];
        assert_eq!(record.mode & 0o170_000, 0o120_000, "{path} is no link");
        &record.content
    }

    fn text(&self, path: &str) -> String {
        let node = self.tree.node(self.tree.find(path.as_bytes()).unwrap());
        let oci_image::tree::Kind::File(content) = &node.kind else {
            panic!("{path} is no file");
        };
        let mut text = Vec::new();
        for segment in &content.segments {
            let mut bytes = vec![0; usize::try_from(segment.len).unwrap()];
            let layer = usize::try_from(content.layer).unwrap();
            let archive = self.archives[layer].as_slice();
            archive.read_at(&mut bytes, segment.offset).unwrap();
            text.extend(bytes);
        }
        String::from_utf8(text).unwrap()
    }
}

fn refusal(items: &[Item]) -> String {
    match Provisioned::of(items) {
        Ok(_) => panic!("the image is not refused"),
        Err(error) => error.to_string(),
    }
}

/// The header of an ELF file for a machine.
fn program(class: u8, machine: u8) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
    bytes[18] = machine;
    bytes
}

fn x86_64() -> Vec<u8> {
    program(2, 62)
}

/// An image of Debian: merged /usr, passwords in their own file, no `user`.
fn debian() -> Vec<Item> {
    let mut items = vec![
        symlink("bin", "usr/bin"),
        symlink("sbin", "usr/sbin"),
        dir("usr/local").mode(0o755),
        file("usr/local/lib/python3/x.py", "x"),
        symlink("usr/local/python", "/usr/bin/python3"),
        file("usr/bin/bash", x86_64()).mode(0o755),
        symlink("usr/bin/sh", "bash"),
        file("usr/bin/sudo", "x").mode(0o4755),
        file("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n"),
        file("etc/group", "root:x:0:\n"),
        file("etc/shadow", "root:*:1:0:99999:7:::\n")
            .mode(0o640)
            .owner(0, 42),
        file("etc/skel/.bashrc", "# rc").mode(0o644),
        symlink("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
        file("etc/hosts", "1.2.3.4 builder\n"),
        file("etc/mtab", "builder"),
    ];
    let others = PROGRAMS
        .iter()
        .filter(|name| **name != "sh" && **name != "unzip");
    items.extend(others.map(|name| file(format!("usr/bin/{name}"), "x").mode(0o755)));
    items
}

#[test]
fn debian_gets_a_user_and_keeps_its_programs() {
    let made = Provisioned::of(&debian()).unwrap();
    assert_eq!(
        made.text("/etc/passwd"),
        "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
    );
    assert_eq!(made.text("/etc/group"), "root:x:0:\nuser:x:1000:\n");
    let shadow = "root:*:1:0:99999:7:::\nuser:!:19723:0:99999:7:::\n";
    assert_eq!(made.text("/etc/shadow"), shadow);
    assert_eq!(
        (made.mode("/etc/shadow"), made.owner("/etc/shadow")),
        (0o100_640, (0, 42))
    );
    assert!(!made.has("/etc/gshadow"));
    assert_eq!(
        (made.mode("/home/user"), made.owner("/home/user")),
        (0o040_755, (1000, 1000))
    );
    assert_eq!(made.text("/home/user/.bashrc"), "# rc");
    assert_eq!(made.owner("/home/user/.bashrc"), (1000, 1000));
    assert_eq!(made.text("/bin/bash"), String::from_utf8(x86_64()).unwrap());
    // The only program that was missing.
    assert_eq!(made.link("/usr/bin/unzip"), BUSYBOX);
    assert!(made.has("/usr/bin/ls") && !made.has("/usr/bin/busybox"));
    assert_eq!(made.text(BUSYBOX), "static busybox");
    assert_eq!(
        made.text("/etc/resolv.conf"),
        include_str!("../../../../guest/images/base/files/etc/resolv.conf")
    );
    assert!(!made.text("/etc/hosts").contains("builder"));
    assert_eq!(made.link("/etc/mtab"), "../proc/self/mounts");
    assert_eq!(made.mode("/etc/sudoers.d/user"), 0o100_440);
    assert_eq!(made.mode("/usr/bin/sudo"), 0o104_755);
    assert_eq!(
        (made.mode("/tmp"), made.mode("/proc")),
        (0o041_777, 0o040_555)
    );
    for path in [
        "/usr/local",
        "/usr/local/lib",
        "/usr/local/lib/python3/x.py",
    ] {
        assert_eq!(made.mode(path) & 0o7777, 0o777, "{path}");
    }
    assert_eq!(made.link("/usr/local/python"), "/usr/bin/python3");
}

#[test]
fn alpine_gets_bash_and_what_its_busybox_lacks() {
    let made = Provisioned::of(&[
        file("bin/busybox", x86_64()).mode(0o755),
        symlink("bin/sh", "/bin/busybox"),
        symlink("bin/ls", "/bin/busybox"),
        file("lib/ld-musl-x86_64.so.1", x86_64()).mode(0o755),
        // Without a newline at the end.
        file("etc/passwd", "root:x:0:0:root:/root:/bin/sh"),
        file("etc/group", "root:x:0:root\nusers:x:1000:"),
    ])
    .unwrap();
    assert_eq!(made.text("/bin/bash"), "static bash");
    assert_eq!(made.link("/bin/ls"), "/bin/busybox");
    assert_eq!(made.link("/bin/sh"), "/bin/busybox");
    assert_eq!(made.link("/bin/tar"), BUSYBOX);
    assert_eq!(
        made.text("/etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1001:1001::/home/user:/bin/bash\n"
    );
    let group = "root:x:0:root\nusers:x:1000:\nuser:x:1001:\n";
    assert_eq!(made.text("/etc/group"), group);
}

#[test]
fn distroless_and_scratch_get_a_shell_and_accounts() {
    let distroless = vec![
        file(
            "etc/passwd",
            "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n",
        ),
        file("app", x86_64()).mode(0o755),
    ];
    for items in [
        distroless,
        vec![file("app", x86_64()).mode(0o755)],
        Vec::new(),
    ] {
        let made = Provisioned::of(&items).unwrap();
        assert_eq!(made.text("/bin/bash"), "static bash");
        for name in PROGRAMS {
            assert_eq!(made.link(&format!("/bin/{name}")), BUSYBOX);
        }
        let passwd = made.text("/etc/passwd");
        assert!(passwd.starts_with("root:x:0:0:") && passwd.contains("\nuser:x:1000:1000:"));
        for path in [
            "/dev", "/etc", "/mnt", "/proc", "/root", "/run", "/sys", "/tmp",
        ] {
            assert_eq!(made.mode(path) & 0o170_000, 0o040_000, "{path}");
        }
    }
}

#[test]
fn an_account_user_and_its_home_are_kept() {
    let made = Provisioned::of(&[
        file("etc/passwd", "user:x:1234:99:me:/srv/me:/bin/zsh\n"),
        file("etc/group", "other:x:99:\n"),
        dir("srv/me").mode(0o700).owner(5, 5),
        file("srv/me/kept", "k"),
        file("etc/skel/.profile", "p"),
    ])
    .unwrap();
    let passwd = "user:x:1234:99:me:/srv/me:/bin/zsh\nroot:x:0:0:root:/root:/bin/bash\n";
    assert_eq!(made.text("/etc/passwd"), passwd);
    assert_eq!(
        (made.mode("/srv/me"), made.owner("/srv/me")),
        (0o040_700, (1234, 99))
    );
    assert!(made.has("/srv/me/kept") && !made.has("/srv/me/.profile") && !made.has("/home/user"));
}

#[test]
fn hard_links_below_usr_local_stay_links() {
    let made = Provisioned::of(&[
        file("usr/local/bin/a", "a").mode(0o4755),
        hardlink("usr/local/bin/b", "usr/local/bin/a"),
    ])
    .unwrap();
    assert_eq!(made.mode("/usr/local/bin/b"), 0o100_777);
    assert_eq!(
        made.listing[&b"/usr/local/bin/b"[..]].first,
        b"/usr/local/bin/a"
    );
}

#[test]
fn images_that_cannot_be_completed_are_refused_with_cause_and_cure() {
    for (items, parts) in [
        (vec![file("proc", "")], ["a file at /proc", "remove it"]),
        (
            vec![symlink("etc", "x"), file("x", "")],
            ["a file at /etc", "remove it"],
        ),
        (
            vec![dir("etc/passwd")],
            ["/etc/passwd", "is not a regular file"],
        ),
        (
            vec![file("etc/group", vec![b'x'; (1 << 20) + 1])],
            ["/etc/group", "1 MiB"],
        ),
        (vec![file("etc/shadow", b"\xff")], ["/etc/shadow", "UTF-8"]),
        (
            vec![file("etc/passwd", "user:x:no\n")],
            ["/etc/passwd", "malformed"],
        ),
        (
            vec![
                file("etc/passwd", "user:x:1:1::/h:/bin/sh\n"),
                file("h", ""),
            ],
            ["/etc/passwd", "a file as its home"],
        ),
        (
            vec![file("bin/sh", program(1, 3))],
            ["/bin/sh", "linux/amd64"],
        ),
        (
            vec![file("bin/bash", program(2, 183))],
            ["/bin/bash", "linux/amd64"],
        ),
    ] {
        let text = refusal(&items);
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    // Scripts are not bound to a machine.
    assert!(Provisioned::of(&[file("bin/sh", "#!/opt/shell with arguments\n")]).is_ok());
}

#[test]
fn links_of_an_image_do_not_lead_additions_out_of_it() {
    let made = Provisioned::of(&[
        symlink("etc", "../../../../usr/etc"),
        dir("usr/etc"),
        symlink("usr/etc/passwd", "/../../root/passwd"),
        symlink("home", "/elsewhere"),
        symlink("usr/lib", "/usr/lib"),
    ]);
    // `/usr/lib` is a loop.
    let error = made.err().unwrap();
    assert!(matches!(error, ProvisionError::Apply(_)), "{error}");
    let made = Provisioned::of(&[
        symlink("etc", "../../../../usr/etc"),
        dir("usr/etc"),
        symlink("usr/etc/passwd", "/../../root/passwd"),
    ])
    .unwrap();
    assert!(made.text("/usr/etc/passwd").contains("user:x:1000"));
    assert!(!made.has("/root/passwd"));
}
