//! Different kinds of images as guests.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use oci_image::provision::PROGRAMS;

use crate::{
    guest::{Guest, artifact},
    layout::{root_image_of, run},
};

/// Boots an image of the tree that `make` writes, and checks the properties that all sandboxes have.
fn boot(make: impl FnOnce(&Path), check: impl FnOnce(&Guest)) {
    let dir = tempfile::Builder::new().prefix("cube-i").tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    make(&tree);
    let image = root_image_of(&tree, dir.path(), &artifact(""));
    let guest = Guest::boot(&image.path(), dir.path());
    check_sandbox(&guest);
    check(&guest);
}

/// Commands, users and files through the agent.
fn check_sandbox(guest: &Guest) {
    assert_eq!(
        guest.sh(None, "id -un; pwd; echo $HOME"),
        "user\n/home/user\n/home/user"
    );
    assert_eq!(
        guest.sh(Some("root"), "id -u; id -g; echo $HOME"),
        "0\n0\n/root"
    );
    let mut agent = guest.agent();
    agent
        .write_file("/home/user/a/b", b"content", Some("user"))
        .unwrap();
    assert_eq!(agent.read_file("a/b", Some("user")).unwrap(), b"content");
    assert_eq!(
        guest.sh(None, "stat -c '%U %a' a/b; cat a/b"),
        "user 644\ncontent"
    );
    // Users cannot read root's files, and can write to the directories that E2B opens to them.
    assert_eq!(
        guest
            .exec(None, "/bin/bash", &["-c", "cat /run/cube/envs"])
            .exit_code,
        1
    );
    guest.sh(None, "mkdir /usr/local/mine /code/mine && touch /tmp/t");
    // Commands used by E2B's steps and ready commands.
    guest.sh(
        Some("root"),
        "cd /tmp && mkdir d && echo x > d/f && tar -cz d | tar -tz | grep -q d/f",
    );
    guest.sh(None, "sleep 60 & ps | grep -q sleep && kill $!");
    assert_eq!(
        guest.sh(
            None,
            "(exit 7); echo $?; [[ a == a* ]] && x=(1 2 3) && echo ${#x[@]}"
        ),
        "7\n3"
    );
    assert_eq!(guest.exec(None, "/bin/sh", &["-c", "exit 3"]).exit_code, 3);
    assert!(
        guest
            .sh(None, "cat /etc/resolv.conf")
            .contains("nameserver 169.254.0.22")
    );
    guest.sh(
        None,
        &format!(
            "for p in {}; do type -P \"$p\" || exit 1; done",
            PROGRAMS.join(" ")
        ),
    );
}

/// A tree of Debian made by mmdebstrap, without the additions of `cargo xtask prepare` for sandboxes.
fn debian(tree: &Path) {
    let mounted = tempfile::tempdir().unwrap();
    run(Command::new("mount")
        .args(["-t", "erofs", "-o", "ro,loop"])
        .arg(artifact("base.erofs"))
        .arg(mounted.path()));
    let copied = Command::new("sh")
        .arg("-c")
        .arg(
            "tar -C \"$1\" --one-file-system --exclude=node* --exclude=./usr/lib/modules \
             --exclude=./usr/lib/python3* --exclude=./home/user --exclude=./code --exclude=./etc/sudoers.d/user \
             --exclude=./usr/bin/tar -cf - . | tar -C \"$2\" -xpf -",
        )
        .args([Path::new("sh"), mounted.path(), tree])
        .output();
    run(Command::new("umount").arg(mounted.path()));
    let copied = copied.unwrap();
    assert!(copied.status.success(), "{copied:?}");
    for name in ["passwd", "group", "shadow", "gshadow"] {
        let path = tree.join("etc").join(name);
        let text = fs::read_to_string(&path).unwrap();
        let others = text.lines().filter(|line| !line.starts_with("user:"));
        let others: String = others.map(|line| format!("{line}\n")).collect();
        assert!(others.len() < text.len(), "{name} has no account user");
        fs::write(&path, others).unwrap();
    }
}

pub(crate) fn kvm_an_image_of_debian_serves_the_agent() {
    boot(debian, |guest| {
        assert_eq!(guest.sh(None, "sudo id -un"), "root");
        assert!(guest.sh(None, "cat /etc/os-release").contains("ID=debian"));
        // dpkg works on a root that consists of image and layer.
        guest.sh(
            Some("root"),
            "dpkg --verify coreutils && useradd -m other && id other",
        );
        assert_eq!(guest.sh(Some("other"), "pwd"), "/home/other");
        assert!(
            guest
                .sh(None, "ls -l $(type -P tar)")
                .contains("/usr/lib/cube/busybox")
        );
    });
}

fn executable(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    fs::copy(from, to).unwrap();
    fs::set_permissions(to, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Like images of Alpine: busybox, no bash, accounts with ash.
fn busybox(tree: &Path) {
    executable(&artifact("busybox"), &tree.join("bin/busybox"));
    for name in ["sh", "ls", "cat", "id", "tar"] {
        symlink("/bin/busybox", tree.join("bin").join(name)).unwrap();
    }
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/os-release"), "ID=alpine\n").unwrap();
    let passwd = "root:x:0:0:root:/root:/bin/ash\nsomeone:x:1000:1000::/:/bin/sh\n";
    fs::write(tree.join("etc/passwd"), passwd).unwrap();
    fs::write(tree.join("etc/group"), "root:x:0:root\nsomeone:x:1000:\n").unwrap();
}

pub(crate) fn kvm_an_image_of_busybox_serves_the_agent() {
    boot(busybox, |guest| {
        assert_eq!(
            guest.sh(None, "id -u; readlink /bin/tar"),
            "1001\n/bin/busybox"
        );
    });
}

/// Like distroless images: a program with its libraries, accounts, no shell.
fn without_shell(tree: &Path) {
    executable(Path::new("/bin/date"), &tree.join("app/date"));
    for library in [
        "/lib64/ld-linux-x86-64.so.2",
        "/lib/x86_64-linux-gnu/libc.so.6",
    ] {
        executable(Path::new(library), &tree.join(&library[1..]));
    }
    for dir in ["etc", "home/nonroot"] {
        fs::create_dir_all(tree.join(dir)).unwrap();
    }
    let passwd =
        "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n";
    fs::write(tree.join("etc/passwd"), passwd).unwrap();
}

pub(crate) fn kvm_an_image_without_a_shell_serves_the_agent() {
    boot(without_shell, |guest| {
        assert_eq!(guest.sh(None, "/app/date -u -d @0 +%Y"), "1970");
        assert_eq!(guest.exec(Some("nonroot"), "/app/date", &[]).exit_code, 0);
    });
}

pub(crate) fn kvm_an_empty_image_serves_the_agent() {
    let file = |tree: &Path| fs::write(tree.join("data"), "only this").unwrap();
    boot(file, |guest| {
        assert_eq!(guest.sh(None, "cat /data"), "only this");
        let applets = guest.sh(None, "/usr/lib/cube/busybox --list");
        let has = |name: &&str| applets.lines().any(|applet| applet == *name);
        assert!(PROGRAMS.iter().all(has), "{applets}");
    });
}
