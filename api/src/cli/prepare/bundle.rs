//! Bundles: the inputs of a template that a package brings besides `base`, such as the code interpreter. The template
//! itself holds the CPU state of its host, so it is built here.
//!
//! ```text
//! <program directory>/../guest/templates/NAME/   recipe.json, root image, files/, warm-up.json
//! <state>/installed/guest/                       the root image, as a link or copy
//! <state>/installed/templates/NAME/              the template, with bundle.sum
//! ```
//! A template follows its bundle: it is built again when the bundle has changed, and removed with it. Templates without
//! `bundle.sum` belong to others.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use model::{GuestPaths, template_file};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use pool::durable::{sync_dir, sync_files};
use sha2::{Digest, Sha256};
use template::{RECIPE_NAME, Recipe};

use super::{Installation, keep, publish};
use crate::cli::Failure;

/// The hash of the bundle from which the template next to it was built.
const SUM: &str = "bundle.sum";

/// Builds the templates of all bundles below `from` that are missing or out of date, and removes those whose bundles
/// have gone. A bundle that fails is reported only: the server serves the other templates.
pub(super) fn prepare_all(from: &Path, to: &Installation<'_>) -> Result<(), Failure> {
    let failed = |why: io::Error| Failure::UnsuitableHost(format!("{}: {why}", from.display()));
    let bundles = dirs(from).map_err(failed)?;
    for template in dirs(&to.templates).map_err(failed)? {
        let has_bundle = bundles
            .iter()
            .any(|b| b.file_name() == template.file_name());
        if template.join(SUM).is_file() && !has_bundle {
            eprintln!(
                "cube-api: removing {}: its package has gone",
                template.display()
            );
            remove(&template, to.guest).map_err(failed)?;
        }
    }
    for bundle in &bundles {
        if let Err(why) = prepare(bundle, to) {
            eprintln!("cube-api: {why}");
        }
    }
    Ok(())
}

/// Removes a template, and its root image if that was a bundle's. Sandboxes that run keep links of their own.
fn remove(template: &Path, guest: &Path) -> io::Result<()> {
    let root = Recipe::read(template)
        .ok()
        .flatten()
        .map(|recipe| recipe.root.path);
    fs::remove_dir_all(template)?;
    let guest = guest.canonicalize()?;
    let is_ours = |root: &PathBuf| {
        root.parent() == Some(&guest) && root.file_name() != Some(OsStr::new(super::ROOT))
    };
    root.filter(is_ours)
        .map_or(Ok(()), |root| super::remove(&root))
}

/// The directories in `dir`, which may not exist, in the order of their names.
fn dirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn prepare(bundle: &Path, to: &Installation<'_>) -> Result<(), Failure> {
    let failed = |why: io::Error| Failure::UnsuitableHost(format!("{}: {why}", bundle.display()));
    let sum = sum(bundle).map_err(failed)?;
    let name = bundle.file_name().unwrap_or_default();
    let template = to.templates.join(name);
    if fs::read_to_string(template.join(SUM)).is_ok_and(|built| built == sum) {
        return Ok(());
    }
    let (recipe, files) = local(bundle, to.guest).map_err(failed)?;
    let out = to.build(&name.to_string_lossy(), &recipe, files.as_deref())?;
    let warm_up = bundle.join(template_file::WARM_UP);
    if warm_up.is_file() {
        fs::copy(&warm_up, out.join(template_file::WARM_UP)).map_err(failed)?;
    }
    fs::write(out.join(SUM), sum).map_err(failed)?;
    install(&out, &template).map_err(failed)
}

/// Gives a built template its name. One of a previous bundle is exchanged with it, so that there is one at each moment;
/// the sandboxes of a running server have links of their own.
fn install(out: &Path, template: &Path) -> io::Result<()> {
    if !template.exists() {
        return keep(out, template);
    }
    sync_files(out)?;
    renameat2(
        AT_FDCWD,
        out,
        AT_FDCWD,
        template,
        RenameFlags::RENAME_EXCHANGE,
    )?;
    sync_dir(template.parent().unwrap_or(template))?;
    fs::remove_dir_all(out)
}

/// The bundle's recipe with the files of this host, and the files for the guest.
fn local(bundle: &Path, guest: &Path) -> io::Result<(Recipe, Option<PathBuf>)> {
    let missing = || io::Error::other(format!("there is no {RECIPE_NAME}"));
    let recipe = Recipe::read(bundle)?.ok_or_else(missing)?;
    let root = recipe.root.path.file_name().unwrap_or_default();
    let installed = guest.join(root);
    publish(&bundle.join(root), &installed)?;
    let inputs = Recipe::of(
        &GuestPaths {
            root: installed,
            ..super::guest_paths(guest)
        },
        recipe.memory,
    )?;
    if inputs.root.sparse_sha256 != recipe.root.sparse_sha256 {
        let root = root.display();
        return Err(io::Error::other(format!(
            "{root} is damaged: install the package again"
        )));
    }
    let recipe = Recipe {
        kernel: inputs.kernel,
        initrd: inputs.initrd,
        root: inputs.root,
        layer: inputs.layer,
        ..recipe
    };
    Ok((recipe, template::files_of(bundle)))
}

/// A hash over the recipe, which has the hash of the root image, the warm-up, and the files for the guest.
fn sum(bundle: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut pending = vec![bundle.join(RECIPE_NAME)];
    pending.extend(template::files_of(bundle));
    pending.extend(Some(bundle.join(template_file::WARM_UP)).filter(|path| path.is_file()));
    while let Some(path) = pending.pop() {
        let name = path.strip_prefix(bundle).unwrap_or(&path);
        hash.update(format!("{}\n", name.display()));
        if path.is_dir() {
            let mut entries = fs::read_dir(&path)?
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<io::Result<Vec<_>>>()?;
            entries.sort();
            pending.extend(entries);
        } else {
            hash.update(template::file_sum(&path)?);
        }
    }
    Ok(model::hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use model::Bytes;

    use super::*;

    fn write_bundle(dir: &Path) {
        fs::create_dir_all(dir.join("files/usr")).unwrap();
        fs::write(dir.join("root.erofs"), "root").unwrap();
        fs::write(dir.join("files/usr/a"), "a").unwrap();
        for name in ["vmlinux", "initramfs.cpio", "layer.ext4"] {
            fs::write(dir.join(name), name).unwrap();
        }
        let paths = GuestPaths {
            root: dir.join("root.erofs"),
            ..super::super::guest_paths(dir)
        };
        let recipe = Recipe::of(&paths, Bytes::mib(256)).unwrap();
        let text = serde_json::to_vec(&recipe).unwrap();
        fs::write(dir.join(RECIPE_NAME), text).unwrap();
    }

    #[test]
    fn every_part_of_a_bundle_counts_and_the_host_s_own_files_replace_those_of_the_recipe() {
        let dir = tempfile::tempdir().unwrap();
        let (bundle, guest) = (dir.path().join("bundle"), dir.path().join("guest"));
        write_bundle(&bundle);
        let first = sum(&bundle).unwrap();
        fs::write(bundle.join("files/usr/a"), "b").unwrap();
        let second = sum(&bundle).unwrap();
        fs::write(bundle.join(template_file::WARM_UP), "[]").unwrap();
        let sums = [first, second, sum(&bundle).unwrap()];
        assert!(sums[0] != sums[1] && sums[1] != sums[2] && sums[0] != sums[2]);

        fs::create_dir(&guest).unwrap();
        for name in ["vmlinux", "initramfs.cpio", "layer.ext4"] {
            fs::write(guest.join(name), "of this host").unwrap();
        }
        let (recipe, files) = local(&bundle, &guest).unwrap();
        assert_eq!(
            recipe.kernel.path,
            guest.join("vmlinux").canonicalize().unwrap()
        );
        assert_eq!(
            recipe.root.path,
            guest.join("root.erofs").canonicalize().unwrap()
        );
        assert_eq!(files, Some(bundle.join("files")));

        fs::write(bundle.join("root.erofs"), "cut").unwrap();
        let why = local(&bundle, &guest).unwrap_err().to_string();
        assert!(why.contains("install the package again"), "{why}");
    }

    #[test]
    fn a_template_goes_with_its_bundle_and_a_newer_one_replaces_it() {
        let dir = tempfile::tempdir().unwrap();
        let to = Installation {
            guest: dir.path(),
            templates: dir.path().join("templates"),
            vmm: dir.path(),
        };
        for (name, file) in [("base", "x"), ("gone", SUM)] {
            fs::create_dir_all(to.templates.join(name)).unwrap();
            fs::write(to.templates.join(name).join(file), "").unwrap();
        }
        write_bundle(dir.path());
        fs::copy(
            dir.path().join(RECIPE_NAME),
            to.templates.join("gone").join(RECIPE_NAME),
        )
        .unwrap();
        prepare_all(&dir.path().join("none"), &to).unwrap();
        assert_eq!(dirs(&to.templates).unwrap(), [to.templates.join("base")]);
        assert!(!dir.path().join("root.erofs").exists() && dir.path().join("vmlinux").exists());

        let new = dir.path().join("new");
        fs::create_dir(&new).unwrap();
        fs::write(new.join("y"), "").unwrap();
        install(&new, &to.templates.join("base")).unwrap();
        let base = to.templates.join("base");
        assert!(base.join("y").exists() && !base.join("x").exists() && !new.exists());
    }
}
