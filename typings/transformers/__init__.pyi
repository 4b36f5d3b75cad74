# The names of transformers that this project uses, each from its own module. The library's __init__ imports every model
# for a type checker, which is a quarter of pyright's time here. Another name is added as another line.
from transformers.cache_utils import Cache as Cache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

PreTrainedTokenizerFast = TokenizersBackend
