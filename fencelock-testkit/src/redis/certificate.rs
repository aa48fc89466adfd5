//! Certificates for a server that speaks TLS: an authority of its own, and a server certificate for 127.0.0.1.

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use std::path::Path;

/// Writes `ca.pem`, `server.pem` and `server.key` into a directory.
///
/// # Panics
/// When they cannot be made or written.
pub fn write(dir: &Path) {
    let authority_key = KeyPair::generate().expect("a key can be made");
    let mut authority = CertificateParams::new(Vec::new()).expect("no names, no bad names");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let signed = authority.self_signed(&authority_key).expect("an authority signs itself");
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate().expect("a key can be made");
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let server = CertificateParams::new(names).expect("the names are good");
    let server = server.signed_by(&key, &issuer).expect("the authority signs");
    for (file, text) in [("ca.pem", signed.pem()), ("server.pem", server.pem()), ("server.key", key.serialize_pem())] {
        std::fs::write(dir.join(file), text).expect("the directory can be written to");
    }
}
