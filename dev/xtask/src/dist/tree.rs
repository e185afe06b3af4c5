//! The file trees of the package and of the archive.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use model::template_file;

use super::place;
use crate::{
    stages::{
        binaries::{BUILD_RECORD, HostBinaries, PROBE, PROGRAMS},
        guest_dir, initramfs, layer, root_image, stage, userland,
    },
    tool,
    workspace::Workspace,
};

const LIB: &str = "usr/lib/cube";
/// The programs for users, which are in PATH.
const COMMANDS: [&str; 3] = ["cube", "cube-api", "cube-bench"];
/// The template of the second package.
const INTERPRETER: &str = "code-interpreter-v1";
const UNITS: [&str; 2] = ["cube-api.service", "cube-api.socket"];
const CONFIG: &str = "cube.toml";
/// The empty layer, compressed: a package or archive would store its 4 GiB of holes as zeros.
const LAYER_ARCHIVE: &str = "layer.tar.gz";

pub(super) struct Tree<'a> {
    pub(super) workspace: &'a Workspace,
    pub(super) binaries: &'a HostBinaries,
    pub(super) version: &'a str,
    /// The documents as a web site.
    pub(super) site: &'a Path,
    pub(super) log: &'a Path,
}

impl Tree<'_> {
    pub(super) fn package(&self, root: &Path) -> Result<()> {
        let lib = root.join(LIB);
        self.programs(&lib.join("bin"))?;
        self.guest(&lib.join("guest"))?;
        let bin = root.join("usr/bin");
        fs::create_dir_all(&bin)?;
        for name in COMMANDS
            .iter()
            .filter(|name| lib.join("bin").join(name).exists())
        {
            symlink(format!("../lib/cube/bin/{name}"), bin.join(name))?;
        }
        for unit in UNITS {
            self.copy(
                &self.packaging(unit),
                &root.join("usr/lib/systemd/system").join(unit),
                0o644,
            )?;
        }
        self.copy(
            &self.packaging(CONFIG),
            &root.join("etc/cube").join(CONFIG),
            0o644,
        )?;
        self.site(&lib.join("docs"))?;
        let documents = root.join("usr/share/doc/cube");
        self.documents(&documents)?;
        symlink("../../../lib/cube/docs", documents.join("html"))?;
        self.pages(&lib.join("bin/cube"), &root.join("usr/share"))?;
        self.control(root)
    }

    /// The inputs of the template in the directory `template`, from which `cube-api prepare` builds it on a host.
    pub(super) fn interpreter(&self, template: &Path, root: &Path) -> Result<()> {
        let recipe = template::Recipe::read(template)?;
        let recipe = recipe.with_context(|| format!("{} has no recipe", template.display()))?;
        let image = &recipe.root.path;
        let name = image.file_name().context("the root image has no name")?;
        let bundle = root.join(LIB).join("guest/templates").join(INTERPRETER);
        place(image, &bundle.join(name))?;
        for name in [template::RECIPE_NAME, template_file::WARM_UP] {
            place(&template.join(name), &bundle.join(name))?;
        }
        let files = template::files_of(template).context("the template has no files")?;
        let mut copy = Command::new("cp");
        copy.arg("--recursive").arg(&files).arg(&bundle);
        tool::run(&mut copy, self.log)?;
        let mut readable = Command::new("chmod");
        tool::run(
            readable.args(["--recursive", "u=rwX,go=rX"]).arg(&bundle),
            self.log,
        )?;
        let documents = root.join("usr/share/doc/cube-code-interpreter");
        self.copy(
            &self.packaging("copyright"),
            &documents.join("copyright"),
            0o644,
        )?;
        self.write_control(root, "control-interpreter")?;
        for script in ["postinst", "postrm"] {
            self.copy(
                &self.packaging("reload"),
                &root.join("DEBIAN").join(script),
                0o755,
            )?;
        }
        Ok(())
    }

    /// The manual pages and shell completions that `cube` generates.
    fn pages(&self, cube: &Path, share: &Path) -> Result<()> {
        let mut man = Command::new(cube);
        man.args(["generate", "man"]).arg(share.join("man/man1"));
        tool::run(&mut man, self.log)?;
        for (shell, file) in [
            ("bash", "bash-completion/completions/cube"),
            ("zsh", "zsh/vendor-completions/_cube"),
            ("fish", "fish/vendor_completions.d/cube.fish"),
        ] {
            let text = tool::output(Command::new(cube).args(["generate", "completions", shell]))?;
            self.write(&share.join(file), &text, 0o644)?;
        }
        Ok(())
    }

    pub(super) fn archive(&self, root: &Path) -> Result<()> {
        self.programs(&root.join("bin"))?;
        self.guest(&root.join("guest"))?;
        for name in UNITS.into_iter().chain([CONFIG]) {
            self.copy(&self.packaging(name), &root.join("share").join(name), 0o644)?;
        }
        self.site(&root.join("docs"))?;
        self.documents(&root.join("share/doc"))
    }

    /// The programs without debugging information, and `build.json` with the hashes of the stripped files.
    fn programs(&self, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir)?;
        let mut sums = BTreeMap::new();
        for name in PROGRAMS.into_iter().map(|(name, _)| name).chain([PROBE]) {
            let to = dir.join(name);
            let mut strip = Command::new("strip");
            strip.arg("-o").arg(&to).arg(self.binaries.dir.join(name));
            tool::run(&mut strip, self.log)?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
            sums.insert(name, template::file_sum(&to)?);
        }
        let text = fs::read(self.binaries.dir.join(BUILD_RECORD))?;
        let mut record: serde_json::Value = serde_json::from_slice(&text)?;
        record["programs"] = serde_json::to_value(sums)?;
        self.write(
            &dir.join(BUILD_RECORD),
            &serde_json::to_string_pretty(&record)?,
            0o644,
        )
    }

    fn guest(&self, dir: &Path) -> Result<()> {
        let guest = self.workspace.guest();
        let files = [
            "vmlinux",
            initramfs::FILE,
            root_image::FILE,
            guest_dir::MANIFEST,
        ];
        for name in files.into_iter().chain(userland::FILES) {
            place(&guest.join(name), &dir.join(name))?;
        }
        let mut tar = Command::new("tar");
        tar.args([
            "--create",
            "--sparse",
            "--owner=0",
            "--group=0",
            "--mtime=@0",
        ])
        .args(["--use-compress-program=gzip --no-name", "--file"])
        .arg(dir.join(LAYER_ARCHIVE))
        .arg("--directory")
        .arg(&guest)
        .arg(layer::FILE);
        tool::run(&mut tar, self.log)
    }

    fn site(&self, to: &Path) -> Result<()> {
        let mut copy = Command::new("cp");
        copy.args(["--recursive", "--no-target-directory"]);
        tool::run(copy.arg(self.site).arg(to), self.log)?;
        fs::remove_file(to.join(stage::RECORD_NAME))?;
        Ok(())
    }

    fn documents(&self, dir: &Path) -> Result<()> {
        let root = self.workspace.root();
        for (from, to) in [
            ("docs/operate/install.md", "install.md"),
            ("SECURITY.md", "SECURITY.md"),
            ("dev/packaging/copyright", "copyright"),
        ] {
            self.copy(&root.join(from), &dir.join(to), 0o644)?;
        }
        Ok(())
    }

    fn write_control(&self, root: &Path, from: &str) -> Result<()> {
        let template = fs::read_to_string(self.packaging(from))?;
        let control = template.replace("@VERSION@", self.version).replace(
            "@INSTALLED_KIB@",
            &(installed_bytes(root)? >> 10).to_string(),
        );
        self.write(&root.join("DEBIAN/control"), &control, 0o644)
    }

    fn control(&self, root: &Path) -> Result<()> {
        let dir = root.join("DEBIAN");
        self.write_control(root, "control")?;
        self.copy(&self.packaging("conffiles"), &dir.join("conffiles"), 0o644)?;
        for script in ["postinst", "prerm", "postrm"] {
            self.copy(&self.packaging(script), &dir.join(script), 0o755)?;
        }
        Ok(())
    }

    fn packaging(&self, name: &str) -> PathBuf {
        self.workspace.root().join("dev/packaging").join(name)
    }

    fn copy(&self, from: &Path, to: &Path, mode: u32) -> Result<()> {
        let text = fs::read_to_string(from);
        let text = text.with_context(|| format!("cannot read {}", from.display()))?;
        self.write(to, &text, mode)
    }

    fn write(&self, to: &Path, text: &str, mode: u32) -> Result<()> {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))?;
        Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
    }
}

/// The sum of the lengths of all files below a directory.
fn installed_bytes(dir: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        sum += if meta.is_dir() {
            installed_bytes(&entry.path())?
        } else {
            meta.len()
        };
    }
    Ok(sum)
}
