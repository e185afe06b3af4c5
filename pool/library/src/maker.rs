//! Finds the VMM that made an installed template.

use std::{io, path::Path};

use model::{MadeBy, template_file};

use crate::{
    durable::read_bounded,
    manifest::MAX_FILE,
    vmms::{PROGRAM, VmmId, Vmms},
};

/// The VMM that made the installed template in `dir`: the one that the template names or carries, otherwise the current
/// one. Keeps a VMM that the template carries.
pub(crate) fn maker(dir: &Path, vmms: &mut Vmms) -> Result<VmmId, String> {
    let path = dir.join(template_file::MADE_BY);
    let failed = |why: String| format!("{}: {why}", path.display());
    let named = match read_bounded(&path, MAX_FILE) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(failed(e.to_string())),
        Ok(bytes) => {
            let made_by: MadeBy =
                serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
            Some(VmmId::try_from(made_by.vmm_sha256).map_err(failed)?)
        }
    };
    if let Some(vmm) = named.as_ref().and_then(|id| vmms.get(id).ok()) {
        return Ok(vmm.id);
    }
    let program = dir.join(PROGRAM);
    let carried = program
        .is_file()
        .then(|| vmms.keep(&program).map_err(|e| e.to_string()))
        .transpose()?;
    match (named, carried) {
        (None, carried) => Ok(carried.unwrap_or_else(|| vmms.current().clone())),
        (Some(named), Some(carried)) if named == carried => Ok(named),
        (Some(named), None) => Err(format!(
            "the cube-vmm with SHA-256 {named}, which made it, is missing: build the template again, or put that \
             program at {}",
            program.display()
        )),
        (Some(named), Some(carried)) => Err(format!(
            "{} has SHA-256 {carried}, but {named} made the template: build the template again",
            program.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_template_names_or_carries_the_vmm_that_made_it() {
        let root = tempfile::tempdir().unwrap();
        let template = root.path().join("template");
        fs::create_dir(&template).unwrap();
        let present = root.path().join("present");
        fs::write(&present, "release 2").unwrap();
        let mut vmms = Vmms::open(root.path().join("vmms"), &present).unwrap();
        let current = vmms.current().clone();
        assert_eq!(maker(&template, &mut vmms), Ok(current.clone()));

        let former = root.path().join("former");
        fs::write(&former, "release 1").unwrap();
        let mut others = Vmms::open(root.path().join("others"), &former).unwrap();
        let named = others.current().clone();
        let made_by = MadeBy {
            vmm_sha256: named.to_string(),
        };
        let text = serde_json::to_string(&made_by).unwrap();
        fs::write(template.join(template_file::MADE_BY), text).unwrap();
        let why = maker(&template, &mut vmms).unwrap_err();
        assert!(why.contains("put that program at"), "{why}");
        assert_eq!(maker(&template, &mut others), Ok(named.clone()));
        fs::write(template.join(PROGRAM), "release 3").unwrap();
        let why = maker(&template, &mut vmms).unwrap_err();
        assert!(why.contains("build the template again"), "{why}");
        fs::copy(&former, template.join(PROGRAM)).unwrap();
        assert_eq!(maker(&template, &mut vmms), Ok(named.clone()));
        assert!(vmms.get(&named).is_ok() && named != current);

        for wrong in ["", "{\"vmm_sha256\": \"../..\"}"] {
            fs::write(template.join(template_file::MADE_BY), wrong).unwrap();
            assert!(maker(&template, &mut vmms).is_err(), "{wrong}");
        }
    }
}
