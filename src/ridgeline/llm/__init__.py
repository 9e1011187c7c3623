"""Generation and serving: decoder, weights, paged cache, scheduler, sampling, speculation, HTTP server."""
