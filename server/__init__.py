"""The gateway, and the engines that it launches and watches. Never imports vLLM."""
