//! Finds the modules of a kernel and computes the order in which to load them. The dependencies come from each
//! module's own `depends=` field in .modinfo, because Debian's package contains no modules.dep.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use object::{Object, ObjectSection};

/// The reason why no load order can be computed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ModuleError {
    #[error("the kernel has no module {name}, required by {by}")]
    Unknown { name: String, by: String },
    #[error("module {0} depends on itself")]
    Cycle(String),
}

/// The modules of one kernel.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    files: BTreeMap<String, PathBuf>,
    depends: BTreeMap<String, Vec<String>>,
    builtin: BTreeSet<String>,
}

impl Modules {
    /// Reads the modules in `dir`, a kernel's `/lib/modules/<release>`.
    pub(crate) fn load(dir: &Path) -> Result<Self> {
        let list = dir.join("modules.builtin");
        let list =
            fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
        let mut modules = Self {
            builtin: list.lines().filter_map(|l| name_of(Path::new(l))).collect(),
            ..Self::default()
        };
        modules.find(&dir.join("kernel"))?;
        Ok(modules)
    }

    /// Adds one module file. Ignores a file that is not a module.
    pub(crate) fn add(&mut self, file: &Path) -> Result<()> {
        let Some(name) = name_of(file) else {
            return Ok(());
        };
        let failed = || format!("cannot read the module {}", file.display());
        let data = crate::stages::bzimage::unpack_file(fs::read(file).with_context(failed)?)?;
        let depends = depends(&data).with_context(failed)?;
        self.depends.insert(name.clone(), depends);
        self.files.insert(name, file.to_owned());
        Ok(())
    }

    fn find(&mut self, dir: &Path) -> Result<()> {
        let failed = || format!("cannot read {}", dir.display());
        for entry in fs::read_dir(dir).with_context(failed)? {
            let path = entry.with_context(failed)?.path();
            if path.is_dir() {
                self.find(&path)?;
            } else {
                self.add(&path)?;
            }
        }
        Ok(())
    }

    /// The files of the wanted modules and their dependencies: each module after its dependencies, otherwise in the
    /// order of `wanted`. Modules built into the kernel are omitted. A name may end in `*`; a pattern that matches
    /// no module is not an error.
    pub(crate) fn load_order(&self, wanted: &[String]) -> Result<Vec<&Path>, ModuleError> {
        let mut order = Vec::new();
        for name in wanted.iter().map(|name| plain(name)) {
            match name.strip_suffix('*') {
                None => self.visit(&name, "the recipe", &mut Vec::new(), &mut order)?,
                Some(prefix) => {
                    for name in self.files.keys().filter(|n| n.starts_with(prefix)) {
                        self.visit(name, "the recipe", &mut Vec::new(), &mut order)?;
                    }
                }
            }
        }
        let file = |name: &String| self.files.get(name).map(PathBuf::as_path);
        Ok(order.iter().filter_map(file).collect())
    }

    fn visit(
        &self,
        name: &str,
        by: &str,
        path: &mut Vec<String>,
        order: &mut Vec<String>,
    ) -> Result<(), ModuleError> {
        if self.builtin.contains(name) || order.iter().any(|n| n == name) {
            return Ok(());
        }
        if path.iter().any(|n| n == name) {
            return Err(ModuleError::Cycle(name.to_owned()));
        }
        let depends = self.depends.get(name).ok_or(ModuleError::Unknown {
            name: name.to_owned(),
            by: by.to_owned(),
        })?;
        path.push(name.to_owned());
        for needed in depends {
            self.visit(needed, name, path, order)?;
        }
        path.pop();
        order.push(name.to_owned());
        Ok(())
    }
}

/// The name of a module: the stem of its file name, with `-` replaced by `_` as in the kernel. `None` if the file is
/// not a module.
fn name_of(file: &Path) -> Option<String> {
    let (stem, ending) = file.file_name()?.to_str()?.split_once('.')?;
    let is_module = ["ko", "ko.xz", "ko.gz", "ko.zst"].contains(&ending);
    is_module.then(|| plain(stem))
}

fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// The dependencies listed in a module file.
fn depends(data: &[u8]) -> Result<Vec<String>> {
    let file = object::File::parse(data)?;
    let section = file.section_by_name(".modinfo").context("no .modinfo")?;
    let text = section.data()?;
    let names = text
        .split(|b| *b == 0)
        .find_map(|entry| entry.strip_prefix(b"depends="))
        .unwrap_or_default();
    Ok(std::str::from_utf8(names)?
        .split(',')
        .filter(|name| !name.is_empty())
        .map(plain)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(list: &[(&str, &[&str])]) -> Modules {
        let mut modules = Modules::default();
        for (name, needs) in list {
            let needs = needs.iter().map(|n| (*n).to_owned()).collect();
            modules.depends.insert((*name).to_owned(), needs);
            let file = PathBuf::from(format!("{name}.ko"));
            modules.files.insert((*name).to_owned(), file);
        }
        modules
    }

    fn order(modules: &Modules, wanted: &[&str]) -> Result<Vec<String>, ModuleError> {
        let wanted: Vec<_> = wanted.iter().map(|n| (*n).to_owned()).collect();
        let files = modules.load_order(&wanted)?;
        Ok(files.iter().filter_map(|f| name_of(f)).collect())
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let m = modules(&[
            ("virtio_net", &["virtio", "net_failover"]),
            ("net_failover", &["failover"]),
            ("failover", &[]),
            ("virtio", &["virtio_ring"]),
            ("virtio_ring", &[]),
            ("virtio_blk", &["virtio"]),
        ]);
        assert_eq!(
            order(&m, &["virtio-blk", "virtio-net"]).unwrap(),
            [
                "virtio_ring",
                "virtio",
                "virtio_blk",
                "failover",
                "net_failover",
                "virtio_net"
            ]
        );
    }

    #[test]
    fn built_in_modules_are_left_out_and_patterns_may_match_nothing() {
        let mut m = modules(&[("nft_nat", &["nf_nat"]), ("nf_nat", &[]), ("nft_ct", &[])]);
        m.builtin.insert("ext4".to_owned());
        assert_eq!(order(&m, &["ext4", "xt_*"]).unwrap(), [""; 0]);
        assert_eq!(
            order(&m, &["nft_*"]).unwrap(),
            ["nft_ct", "nf_nat", "nft_nat"]
        );
    }

    #[test]
    fn unknown_names_and_cycles_are_errors() {
        let m = modules(&[("a", &["b"]), ("b", &["a"]), ("c", &["d"])]);
        assert_eq!(order(&m, &["a"]), Err(ModuleError::Cycle("a".to_owned())));
        let unknown = |name: &str, by: &str| {
            Err(ModuleError::Unknown {
                name: name.to_owned(),
                by: by.to_owned(),
            })
        };
        assert_eq!(order(&m, &["c"]), unknown("d", "c"));
        assert_eq!(order(&m, &["e"]), unknown("e", "the recipe"));
    }

    #[test]
    fn a_module_is_named_after_its_file() {
        let name = |file: &str| name_of(Path::new(file));
        assert_eq!(name("/lib/virtio-rng.ko"), Some("virtio_rng".to_owned()));
        assert_eq!(name("a/ext4.ko.xz"), Some("ext4".to_owned()));
        assert_eq!(name("modules.order"), None);
    }

    #[test]
    fn a_file_that_is_not_a_module_is_an_error() {
        for bad in [&b""[..], b"\x7fELF", b"text"] {
            assert!(depends(bad).is_err());
        }
    }
}
