//! How the connection is protected: `sslmode` and `ca` of the URL.

use crate::url::Url;
use crate::{Error, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::sync::Arc;
use tokio_postgres::config::SslMode;
use tokio_postgres_rustls::MakeRustlsConnect;

/// Takes `sslmode` and `ca` out of the URL.
///
/// `disable`: never. `prefer`: if the server offers it, against listeners only, as everywhere with PostgreSQL. `require`,
/// `verify-full`, or a `ca`: always, and the server must prove that it is the one of the URL.
pub(super) fn options(url: &mut Url) -> Result<(SslMode, MakeRustlsConnect)> {
    let ca = url.take("ca");
    let mode = match (url.take("sslmode").as_deref(), &ca) {
        (Some("require" | "verify-full"), _) | (None, Some(_)) => SslMode::Require,
        (Some("prefer") | None, None) => SslMode::Prefer,
        (Some("disable"), None) => SslMode::Disable,
        (Some("disable" | "prefer"), Some(_)) => {
            return Err(Error::invalid("option ca is for TLS; write sslmode=verify-full, or leave sslmode out"));
        }
        (Some(other), _) => {
            return Err(Error::invalid(format!(
                "option sslmode={other}: write disable, prefer, require or verify-full (the last two mean the same here)"
            )));
        }
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::invalid("TLS cannot be used").caused_by(error))?;
    let config = if mode == SslMode::Require {
        builder.with_root_certificates(roots(ca.as_deref())?).with_no_client_auth()
    } else {
        let anybody = Arc::new(Anybody(provider));
        builder.dangerous().with_custom_certificate_verifier(anybody).with_no_client_auth()
    };
    Ok((mode, MakeRustlsConnect::new(config)))
}

fn roots(ca: Option<&str>) -> Result<RootCertStore> {
    let Some(path) = ca else { return Ok(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() }) };
    let bad = |why: &str| Error::invalid(format!("option ca={path}: {why}"));
    let mut roots = RootCertStore::empty();
    let certificates =
        CertificateDer::pem_file_iter(path).map_err(|error| bad("cannot read the file").caused_by(error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| bad("not a PEM certificate").caused_by(error))?;
        roots.add(certificate).map_err(|error| bad("not a certificate").caused_by(error))?;
    }
    if roots.is_empty() {
        return Err(bad("no certificate is in it"));
    }
    Ok(roots)
}

/// Takes anybody for the server. For `prefer`, which would go on without TLS as well.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
